"""Stand-in of tau-bench's agent with tools."""

from __future__ import annotations

from tau_bench.agents.base import Agent

RESPOND_ACTION_NAME = "respond"


class ToolCallingAgent(Agent):
    def __init__(self, tools_info, wiki, model, provider, temperature=0.0):
        self.tools_info, self.wiki, self.temperature = tools_info, wiki, temperature
