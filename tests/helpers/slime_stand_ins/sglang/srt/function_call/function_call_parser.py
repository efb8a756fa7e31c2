"""Stand-in of SGLang's parser of tool calls: a response with an odd number of characters is a call."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Call:
    name: str
    parameters: str

    def model_dump(self):
        return asdict(self)


class FunctionCallParser:
    def __init__(self, tools, tool_call_parser):
        self.tools = tools

    def parse_non_stream(self, text):
        return text, [Call("look", '{"key": 1}')] if len(text) % 2 else []
