"""Objects of `furlong.train`: which path they have, and how worker processes get them."""

from __future__ import annotations

import asyncio
import functools
import json
import threading

import pytest

from furlong.core.outcome import Outcome
from furlong.core.sample import Sample
from furlong.core.user_functions import load_function, use_objects
from furlong.core.user_objects import import_path, packed
from furlong.errors import ConfigError, RewardError
from furlong.rewards.sandbox import Sandbox


@pytest.fixture(autouse=True)
def no_objects_are_left():
    yield
    use_objects({})


def test_what_can_be_imported_has_its_path_and_nothing_else():
    assert import_path(json.dumps) == "json:dumps"
    assert import_path(Sample.to_dict) == "furlong.core.sample:Sample.to_dict"

    class Local: ...

    for value in (lambda: None, Local, Local(), [1]):
        assert import_path(value) is None


def test_a_worker_process_calls_closures_and_objects():
    bonus = 0.5

    class Scorer:
        def __init__(self, right):
            self.right = right

        def __call__(self, response):
            return float(response == self.right)

    def reward(response, label):
        return float(response == label) + bonus

    def divide(response):
        return bonus / 0

    @functools.lru_cache(maxsize=8)
    def cached(response):
        return bonus

    class Unloadable:
        def __call__(self, response): ...

        def __setstate__(self, state):
            raise ValueError("no state")

        def __getstate__(self):
            return 1

    use_objects(
        {"reward": reward, "scorer": Scorer("4"), "divide": divide, "cached": cached, "unloadable": Unloadable()}
    )

    async def score(path: str) -> Outcome:
        sandbox = Sandbox(path)
        try:
            [outcome] = await sandbox.score([Sample(response="4", label="4")])
            return outcome
        finally:
            sandbox.close()

    assert asyncio.run(score("python:reward")).reward == 1.5
    assert asyncio.run(score("python:scorer")).reward == 1.0
    assert asyncio.run(score("python:cached")).reward == bonus
    with pytest.raises(
        RewardError, match=r"python:unloadable cannot be created in a worker process: ValueError: no st"
    ):
        asyncio.run(score("python:unloadable"))
    line = divide.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} in divide: return bonus / 0" in asyncio.run(score("python:divide")).reason


def test_the_objects_of_the_next_call_replace_those_before():
    use_objects({"reward": json.dumps})
    assert load_function("python:reward") is json.dumps
    use_objects({"reward": json.loads})
    assert load_function("python:reward") is json.loads
    use_objects({})
    with pytest.raises(ConfigError, match=r"python:reward is an object of the program"):
        load_function("python:reward")


def test_an_object_that_cannot_be_sent_is_an_error_with_a_remedy():
    lock = threading.Lock()
    use_objects({"reward": lambda response: lock})
    with pytest.raises(ConfigError, match=r"reward cannot be sent.*lock.*; create what it uses inside of it"):
        packed("reward")
