"""Classes that cannot be environments are refused before the run starts."""

from __future__ import annotations

from typing import Any

from furlong.config.environment_specs import EnvironmentSpec, class_problems


class Game:
    def reset(self, task: Any, seed: int) -> str:
        return "begin"


class Whole(Game):
    def step(self, message: Any) -> Any: ...


class Batched(Game):
    @staticmethod
    def step_many(steps: Any) -> Any: ...


class OfOneInstance(Whole):
    def step_many(self, steps: Any) -> Any: ...


class Named(Whole):
    def __init__(self, weight: float = 1.0) -> None: ...


class OfGym(Game):
    def step(self, action: Any, info: Any) -> Any: ...


def test_a_class_is_refused_with_the_reason():
    for made, problem in [
        (Whole, ""),
        (Batched, ""),
        (Game, "Game has no step; write a class with reset and step"),
        (OfOneInstance, "OfOneInstance.step_many belongs to one instance"),
        (Named, "parameter weight, which is furlong's own setting"),
        (OfGym, "cannot be called with (message): missing a required argument: 'info'; write def step(self, message)"),
    ]:
        problems = list(class_problems(EnvironmentSpec(made.__name__, f"game.py:{made.__name__}"), made))
        assert len(problems) == bool(problem), problems
        assert problem in "".join(problems)
