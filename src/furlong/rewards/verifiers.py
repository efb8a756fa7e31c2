"""The built-in verifiers by `--rm-type` name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from furlong.config.checks.value_checks import BOXED, verifier_problem
from furlong.errors import ConfigError
from furlong.rewards import dapo, deepscaler, f1, gpqa, math
from furlong.rewards.answers import last_boxed

Score = Callable[[str, Any, Mapping[str, Any]], float | dict[str, Any] | None]


@dataclass(frozen=True)
class Verifier:
    """One way to score (response, label, metadata).

    `quick` runs in the driver: cheap, deterministic, cannot hang. If it returns None, the function at the path
    `slow` decides, in the sandbox. `kind`: the verifier reads the response or the whole sample, or is a server. With
    `is_boxed` the response is first reduced to its last box (see `cut`).
    """

    name: str
    quick: Score | None = None
    slow: str | None = None
    kind: Literal["response", "sample", "server"] = "response"
    is_boxed: bool = False
    wants_box: bool = False

    def cut(self, response: str) -> str:
        """Return the part of the response to score; for a `boxed_` verifier the content of the box, "" without one."""
        if not self.is_boxed:
            return response
        content = last_boxed(response)
        if content is None:
            return ""
        return f"\\boxed{{{content}}}" if self.wants_box else content


_ROWS = (
    Verifier("math", math.quick, "furlong.rewards.algebra.math_score", wants_box=True),
    Verifier("dapo", dapo.score),
    Verifier("deepscaler", deepscaler.quick, "furlong.rewards.algebra.deepscaler_score"),
    Verifier("f1", f1.score),
    Verifier("gpqa", gpqa.score),
    Verifier("remote_rm", kind="server"),
    Verifier("random", kind="sample"),
)
REWARDS = {row.name: row for row in _ROWS}


def find_verifier(name: str) -> Verifier:
    """Return the verifier called `name`; the prefix `boxed_` works with each that reads the response.

    Raises ConfigError that names the closest name, or why the name is refused.
    """
    name = name.strip()
    if (problem := verifier_problem("--rm-type", name)) is not None:
        raise ConfigError(problem)
    inner = name.removeprefix(BOXED)
    return replace(REWARDS[inner], name=name, is_boxed=name != inner)
