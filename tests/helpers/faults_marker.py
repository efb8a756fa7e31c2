"""Mark tests that inject the fault of a diagnosis; tests/faults/test_catalogue.py reads the marks.

`fault_recorder` records the output of a marked test below the command passed to `typed`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])
TESTS = Path(__file__).parents[1]
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


@functools.cache
def injected() -> dict[str, list[str]]:
    """Return row -> names of the tests marked with `@fault(row)`, from the text of the tests."""
    found: dict[str, list[str]] = {}
    texts = [text for path in TESTS.rglob("test_*.py") if "@fault(" in (text := path.read_text())]
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "fault":
                    for id in mark.args:
                        assert isinstance(id, ast.Constant)
                        found.setdefault(str(id.value), []).append(node.name)
    return found
