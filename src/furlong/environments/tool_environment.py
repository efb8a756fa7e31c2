"""An environment whose tools are Python functions; the episode ends when the policy answers without calling one."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from furlong.core.event_loop import call_in_thread
from furlong.core.user_code import is_async, is_raised_by_user
from furlong.environments.protocol import Message, Observation, Step, Task
from furlong.errors import ConfigError, InfraError


class ToolEnvironment:
    """Runs the tool calls of the policy.

    Subclasses list functions or methods in `tools`; type hints and docstrings with a section `Args:` become their
    schema. Functions that are not async run in a thread. A tool that raises, gets wrong arguments, does not exist or
    takes longer than `tool_timeout_s` seconds answers with `Error: ...`, which the policy sees, and which
    `info["tool_errors"]` counts. Output is cut after `max_output_chars` characters. InfraError ends the episode, which
    is issued again.

        class Calculator(ToolEnvironment):
            def add(self, a: int, b: int) -> int:
                '''Add two numbers.

    Args:
                    a: the first number
                    b: the second number
                '''
                return a + b

            tools = [add]
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    tool_timeout_s: ClassVar[float] = 60.0
    max_output_chars: ClassVar[int] = 10_000

    task: Task
    num_calls = 0
    num_errors = 0

    def reset(self, task: Task, seed: int) -> Observation:  # noqa: ARG002  of the protocol
        """Begin with the prompt of the row, and with the tools of the class and of the row."""
        self.task = task
        return Observation(task.messages, [*self.tool_schemas(), *(task.tools or [])] or None)

    async def step(self, message: Message) -> Step:
        """Run the calls of a message, one after the other; without calls the episode ends."""
        calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
        answers: list[dict[str, Any]] = []
        for call in calls:
            text = await self._answer(call["function"]["name"], call["function"]["arguments"])
            answers.append({"role": "tool", "tool_call_id": call.get("id"), "content": text})
        return Step(answers, done=not calls, info={"tool_calls": self.num_calls, "tool_errors": self.num_errors})

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools in OpenAI's form. Raises ConfigError for a tool that has none."""
        from transformers.utils.chat_template_utils import get_json_schema  # here: slow to import

        schemas: list[dict[str, Any]] = []
        for name, tool in self._bound().items():
            try:
                schemas.append(get_json_schema(tool))
            except Exception as error:
                raise ConfigError(
                    f"{type(self).__name__}: the tool {name} has no schema: {error}; write a docstring with a section "
                    "`Args:` and a line `name: description` for each parameter, and type hints"
                ) from error
        return schemas

    def _bound(self) -> dict[str, Callable[..., Any]]:
        return {tool.__name__: getattr(self, tool.__name__, tool) for tool in self.tools}

    async def _answer(self, name: str, arguments: Any) -> str:
        self.num_calls += 1
        try:
            text = await self._call(name, arguments)
        except InfraError:
            raise
        except BaseException as error:
            if not is_raised_by_user(error):
                raise
            self.num_errors += 1
            text = f"Error: {error if isinstance(error, _RefusedCallError) else f'{type(error).__name__}: {error}'}"
        if len(text) > self.max_output_chars:
            text = f"{text[: self.max_output_chars]}... ({len(text)} characters, cut)"
        return text

    async def _call(self, name: str, arguments: Any) -> str:
        tools = self._bound()
        if name not in tools:
            raise _RefusedCallError(f"there is no tool {name!r}; the tools are {', '.join(tools) or 'none'}")
        tool, values = tools[name], _decoded(arguments)
        try:
            inspect.signature(tool).bind(**values)
        except TypeError as error:
            raise _RefusedCallError(f"{name}: {error}") from None
        limit = asyncio.timeout(self.tool_timeout_s)
        try:
            async with limit:
                if is_async(tool):
                    value = await tool(**values)
                else:
                    value, error = await call_in_thread(lambda: tool(**values), name=f"tool {name}")
                    if error is not None:
                        raise error
        except TimeoutError:
            if not limit.expired():
                raise
            raise _RefusedCallError(f"{name} took longer than {self.tool_timeout_s:g} s") from None
        return value if isinstance(value, str) else json.dumps(value, default=str)


class _RefusedCallError(Exception):
    """A call that cannot be run, with the text that the policy gets."""


def _decoded(arguments: Any) -> dict[str, Any]:
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise _RefusedCallError(f"the arguments are not JSON: {error}") from None
    if not isinstance(values, dict):
        raise _RefusedCallError(f"the arguments are {type(values).__name__}; give a JSON object")
    return values
