"""Stand-in of SGLang's types of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Function:
    name: str
    description: str
    parameters: dict


@dataclass
class Tool:
    function: Function
    type: str = "function"
