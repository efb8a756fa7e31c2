"""Stand-in of tau-bench's types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Action:
    name: str
    kwargs: dict[str, Any]


@dataclass
class RunConfig:
    env: str
    agent_strategy: str
    user_model: str
    task_split: str
    user_strategy: str
    model_provider: str
    model: str
    user_model_provider: str
    temperature: float = 0.0


@dataclass
class Info:
    step: int

    def model_dump(self):
        return {"step": self.step}


@dataclass
class Reply:
    observation: str
    info: Info
    reward: float = 0.0
    done: bool = False
    source: dict = field(default_factory=dict)
