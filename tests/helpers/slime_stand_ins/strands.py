"""Stand-in of strands: an agent that asks its model, calls one tool and asks again."""

from __future__ import annotations


def tool(function):
    return function


class Agent:
    def __init__(self, model, tools, hooks, callback_handler, system_prompt):
        self.model, self.tools, self.hooks, self.system = model, tools, hooks, system_prompt

    async def invoke_async(self, prompt):
        await self.model.ask(prompt)
        self.hooks[0].tool_iter_count += 1
        self.hooks[0].tool_call_count += 1
        self.model.observe(self.tools[0]("print(6*7)").strip()[-2:])
        await self.model.ask("")

    def cleanup(self):
        pass
