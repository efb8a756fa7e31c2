"""Environments: what they are made of, their tools and rubrics."""

from furlong.environments.protocol import Environment, Message, Observation, Step, Task

__all__ = ["Environment", "Message", "Observation", "Step", "Task"]
