"""The built-in verifiers by `--rm-type` name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from furlong.config.checks.value_checks import BOXED, verifier_problem
from furlong.core.sample import Sample
from furlong.errors import ConfigError
from furlong.rewards import dapo, deepscaler, f1, gpqa, math
from furlong.rewards.answers import last_boxed

Score = Callable[[str, Any, Mapping[str, Any]], float | dict[str, Any] | None]


@dataclass(frozen=True)
class Verifier:
    r"""A scoring function of (response, label, metadata).

    `quick` runs in the driver: it must be cheap and deterministic and must not hang. If it returns None, the function
    at the path `slow` is called in the sandbox. `kind` is the input: the response, the whole sample, or a request to a
    server. With `is_boxed`, only the last box of the response is scored (see `cut`); `wants_box` keeps its `\boxed{}`.
    """

    name: str
    quick: Score | None = None
    slow: str | None = None
    kind: Literal["response", "sample", "server"] = "response"
    is_boxed: bool = False
    wants_box: bool = False

    def cut(self, response: str) -> str:
        """Return the part of the response that is scored; "" for a `boxed_` verifier and a response without a box."""
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
    """Return the verifier called `name`; the prefix `boxed_` works with those that read the response.

    Raises ConfigError with the closest name, or the reason why the name is refused.
    """
    name = name.strip()
    if (problem := verifier_problem("--rm-type", name)) is not None:
        raise ConfigError(problem)
    inner = name.removeprefix(BOXED)
    return replace(REWARDS[inner], name=name, is_boxed=name != inner)


def random_score(sample: Sample) -> float:
    """Return 0.0 or 1.0 with equal probability, a function of the sample's seed, index and response only.

    A sample gets the same reward on every machine and after a restart.
    """
    text = f"{sample.seed}/{sample.group_index}/{sample.index}/{sample.response}"
    return float(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0] & 1)
