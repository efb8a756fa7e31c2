"""Griffe extension for the API reference: wrap doctest examples in code blocks (see mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a line that starts with `>>>` to the next blank line.
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class FenceDoctests(griffe.Extension):
    """Wrap each block of `>>>` lines in a Python fence, without doctest directives."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002  griffe's signature
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    lines = re.sub(r"\s*# doctest:.*", "", match[0])
    return f"```pycon\n{lines}\n```"
