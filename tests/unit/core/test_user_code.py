"""What functions of the user raise or return instead of what they should."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from furlong.core.sample import Sample
from furlong.core.user_code import describe_exception, location_of, with_hook_errors
from furlong.data.custom_source import CustomDataSource
from furlong.errors import DataError, HookError, RolloutError
from furlong.rollout.filters import DynamicFilterOutput, filter_output
from furlong.rollout.replay import HookSource, instance_of


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch's."""


def broken(kind, text="reason"):
    raise kind(text)


async def broken_later(kind):
    broken(kind)


def test_hook_errors_have_the_line_that_raised():
    with pytest.raises(HookError, match=r"--x-path: f raised KeyError: 'reason'\n.*test_user_code.py:\d+ in broken"):
        with_hook_errors(broken, "--x-path: f")(KeyError)
    for kind in (KeyError, SystemExit):
        with pytest.raises(HookError, match=rf"f raised {kind.__name__}"):
            asyncio.run(with_hook_errors(broken_later, "f")(kind))
        with pytest.raises(HookError, match=rf"f raised {kind.__name__}"):
            with_hook_errors(broken, "f")(kind)


def test_hook_errors_of_an_object_with_an_async_call():
    class Filter:
        async def __call__(self, kind):
            broken(kind)

    with pytest.raises(HookError, match="filter raised KeyError"):
        asyncio.run(with_hook_errors(Filter(), "filter")(KeyError))


def test_known_errors_are_not_wrapped():
    for kind in [DataError, OutOfMemoryError]:
        with pytest.raises(kind, match="reason"):
            with_hook_errors(broken, "f")(kind)
        with pytest.raises(kind, match="reason"):
            asyncio.run(with_hook_errors(broken_later, "f")(kind))


def test_errors_in_data_source_methods_name_the_method():
    class Source:
        def get_samples(self, n):
            return [[Sample(prompt="1")]]

        def add_samples(self, groups):
            raise KeyError("add")

        def save(self, number):
            raise OSError("full")

        def load(self, number):
            """Nothing to load."""

        def __len__(self):
            return 3

    source = CustomDataSource(Source())
    assert source.groups_per_epoch == 3
    groups = source.next_groups(1)
    with pytest.raises(HookError, match="--data-source-path: add_samples raised KeyError"):
        source.return_groups(groups)
    with pytest.raises(HookError, match="--data-source-path: save raised OSError: full"):
        source.state()
    assert instance_of(source) is source.instance


def test_data_source_of_functions_has_a_length_and_rejects_the_rest():
    source = SimpleNamespace(groups_per_epoch=7)
    seen = judged = HookSource(source)
    assert len(seen) == 7
    with pytest.raises(AttributeError, match=r"len\(\).* add_samples"):
        judged.add_samples([])
    source.groups_per_epoch = None
    with pytest.raises(RolloutError, match="--streaming-data"):
        len(seen)
    with pytest.raises(AttributeError, match=r"no attribute 'difficulty'; it has get_samples"):
        seen.difficulty  # noqa: B018
    source.instance = SimpleNamespace(difficulty=0.5)
    assert seen.difficulty == 0.5


def test_a_filter_must_return_a_bool():
    assert filter_output(True).keep
    assert filter_output(DynamicFilterOutput(False, "x")).reason == "x"
    assert (
        filter_output(DynamicFilterOutput(False, "é\ud83d")).reason == "é\\ud83d"
    )  # half of what a response ended with
    for yes in (np.float64(2) > 1, torch.tensor([0.0, 1.0]).std() > 0, DynamicFilterOutput(torch.tensor(True), None)):
        assert filter_output(yes) == DynamicFilterOutput(True)
    assert filter_output(torch.tensor(False)) == DynamicFilterOutput(False, "filter")
    for result in (None, "no", 1.0, torch.tensor(1.0), torch.tensor([True]), DynamicFilterOutput("no")):
        with pytest.raises(RolloutError, match="the filter returned"):
            filter_output(result)


def test_a_long_message_is_truncated():
    reason = describe_exception(ValueError("x" * 50_000))
    assert reason == f"ValueError: {'x' * 600}... (50,000 characters)"


def test_characters_that_a_log_cannot_show_are_escapes():
    assert describe_exception(ValueError("a\ud800\x1b[2J\n\tb")) == r"ValueError: a\ud800\x1b[2J" + "\n\tb"


def test_description_includes_a_line_of_user_code():
    def reads_an_answer() -> None:
        json.loads("{")

    with pytest.raises(ValueError, match="Expecting") as caught:
        reads_an_answer()
    first, *frames = describe_exception(caught.value).splitlines()
    assert first.startswith("JSONDecodeError: ")
    assert frames[0].endswith('in reads_an_answer: json.loads("{")')
    assert len(frames) == 3


def test_attributes_that_are_json_values_are_kept_and_others_raise():
    sample = Sample(prompt="a")
    sample.plan, sample.tool = 5, object()
    there = Sample.from_dict(sample.to_dict())  # as in a reward's process
    assert there.plan == 5
    with pytest.raises(AttributeError, match=r"tool.*`metadata`"):
        _ = there.tool
    assert not hasattr(there, "tool")
    assert copy.deepcopy(there) == pickle.loads(pickle.dumps(there)) == there


def test_ctrl_c_and_the_end_of_a_coroutine_are_not_errors_of_a_hook():
    with pytest.raises(KeyboardInterrupt):
        with_hook_errors(lambda: signal.raise_signal(signal.SIGINT), "f")()

    async def wait():
        await asyncio.sleep(1)

    async def close():
        call = with_hook_errors(wait, "f")()
        call.send(None)
        call.close()

    asyncio.run(close())


def test_base_exceptions_that_the_user_raises_are_errors_of_the_hook():
    class Unreadable(BaseException):
        def __str__(self):
            raise ValueError

    def stop(kind):
        raise kind

    async def stop_later(kind):
        await asyncio.sleep(0)
        raise kind

    line = stop.__code__.co_firstlineno + 1
    for kind in (SystemExit, asyncio.CancelledError, Unreadable):
        with pytest.raises(HookError, match=rf"{kind.__name__}: .*\n.*{__file__}:{line}"):
            with_hook_errors(stop, "f")(kind)
        with pytest.raises(HookError, match=kind.__name__):
            asyncio.run(with_hook_errors(stop_later, "f")(kind))


def test_a_class_is_located():
    class Environment:
        def step(self):
            """Located by its first method."""

    assert location_of(Environment) == f"{__file__}:{Environment.step.__code__.co_firstlineno}"
