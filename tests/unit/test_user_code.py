"""What functions of the user raise or return instead of what they should."""

from __future__ import annotations

import asyncio

import pytest

from furlong.core.sample import Sample
from furlong.core.user_code import named
from furlong.data.custom import CustomDataSource
from furlong.errors import DataError, HookError, RolloutError
from furlong.rollout.filters import DynamicFilterOutput, verdict


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch's."""


def broken(kind, text="reason"):
    raise kind(text)


async def broken_later(kind):
    broken(kind)


def test_exceptions_are_named_with_the_line_that_raised():
    with pytest.raises(HookError, match=r"--x-path: f raised KeyError: 'reason'\n.*test_user_code.py:\d+ in broken"):
        named(broken, "--x-path: f")(KeyError)
    with pytest.raises(HookError, match=r"f raised KeyError"):
        asyncio.run(named(broken_later, "f")(KeyError))


@pytest.mark.parametrize("kind", [DataError, MemoryError, OutOfMemoryError])
def test_what_is_understood_further_up_passes(kind):
    with pytest.raises(kind, match="reason"):
        named(broken, "f")(kind)
    with pytest.raises(kind, match="reason"):
        asyncio.run(named(broken_later, "f")(kind))


def test_methods_of_a_data_source_are_named():
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
        source.give_back(groups)
    with pytest.raises(HookError, match="--data-source-path: save raised OSError: full"):
        source.state()


def test_filter_says_yes_or_no():
    assert verdict(True).keep
    assert verdict(DynamicFilterOutput(False, "x")).reason == "x"
    for result in (None, "no", 1.0):
        with pytest.raises(RolloutError, match="the filter returned"):
            verdict(result)
