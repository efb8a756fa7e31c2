"""Environments: what they are made of, their tools and rubrics."""

from furlong.environments.protocol import Environment, Message, Observation, Step, Task
from furlong.environments.rubric import Episode, Rubric
from furlong.environments.tool_environment import ToolEnvironment

__all__ = ["Environment", "Episode", "Message", "Observation", "Rubric", "Step", "Task", "ToolEnvironment"]
