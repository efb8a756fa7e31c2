"""Mark tests that inject the fault of a diagnosis; tests/faults/test_catalogue.py reads the marks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])
TESTS = Path(__file__).parents[1]


def fault(*ids: str) -> Callable[[Test], Test]:
    """Mark a test with the rows of the catalogue whose fault it injects, in a command or a run."""
    assert ids
    return lambda test: test


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
