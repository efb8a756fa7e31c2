r"""The verifier of DeepScaleR: the answer in `\boxed{}` after the end of the thinking must equal the label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.rewards import math
from furlong.rewards.answers import last_boxed

THOUGHT_ENDS = ("</think>", "###Response")


def final_part(response: str) -> str | None:
    """Return the text after the last end-of-thinking mark, or None if there is no mark."""
    for mark in THOUGHT_ENDS:
        if mark in response:
            return response.rsplit(mark, 1)[-1]
    return None


def quick(response: str, label: Any, metadata: Mapping[str, Any]) -> float | None:
    r"""Return 1.0 or 0.0 if the result is certain without algebra, else None.

    The score is 0.0 for a response without `</think>` (or `###Response`), or without a complete `\boxed{}` after it.
    """
    labels = math.labels_from(label)
    part = final_part(response)
    answer = None if part is None else last_boxed(part)
    return 0.0 if answer is None else math.quick_answer(answer, labels, metadata)
