"""Mark tests that inject the fault of a diagnosis; tests/faults/test_catalogue.py reads the marks.

`fault_recorder` records the output of a marked test below the command passed to `typed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])
_typed: list[str] = []


def fault(*ids: str) -> Callable[[Test], Test]:
    """Mark a test with the rows of the catalogue whose fault it injects, in a command or a run."""

    def mark(test: Test) -> Test:
        test.__dict__["faults"] = (*test.__dict__.get("faults", ()), *ids)
        return test

    return mark


def typed(*words: object) -> None:
    """Remember the command that is about to run; `...` stands for the flags of a healthy run."""
    _typed[:] = [str(word) for word in words]


def last_typed() -> str:
    """Return the last command passed to `typed`, or ""."""
    return " ".join(_typed)
