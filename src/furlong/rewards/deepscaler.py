r"""The verifier of DeepScaleR: a response that has finished thinking and puts its answer into `\boxed{}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.rewards import math
from furlong.rewards.answers import last_boxed

THOUGHT_ENDS = ("</think>", "###Response")


def final_part(response: str) -> str | None:
    """Return the text after the last end-of-thinking mark, or None for a response that never ends its thinking."""
    for mark in THOUGHT_ENDS:
        if mark in response:
            return response.rsplit(mark, 1)[-1]
    return None


def quick(response: str, label: Any, metadata: Mapping[str, Any]) -> float | None:
    r"""Return 1.0 or 0.0 where that is certain without algebra, else None.

    0.0 for a response without `</think>` (or `###Response`) and for one without a complete `\boxed{}` after it.
    """
    labels = math.labels_from(label)
    part = final_part(response)
    answer = None if part is None else last_boxed(part)
    return 0.0 if answer is None else math.quick_answer(answer, labels, metadata)
