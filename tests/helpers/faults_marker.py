"""Marks the test that injects the fault of a diagnosis; tests/faults/test_catalogue.py reads the marks.

`fault_recorder` writes what the program says in a marked test, below the command that `typed` was told of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])
_typed: list[str] = []


def fault(*ids: str) -> Callable[[Test], Test]:
    """Say which rows of the catalogue a test injects the fault of, in a command or a run."""

    def mark(test: Test) -> Test:
        test.__dict__["faults"] = (*test.__dict__.get("faults", ()), *ids)
        return test

    return mark


def typed(*words: object) -> None:
    """Remember the command that is about to be run; `...` stands for flags of the healthy run."""
    _typed[:] = [str(word) for word in words]


def last_typed() -> str:
    """That command, "" if there is none."""
    return " ".join(_typed)
