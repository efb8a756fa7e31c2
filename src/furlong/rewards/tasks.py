"""Rewards of procedural tasks, by the task's own function of the package reasoning-gym. Runs in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from furlong.core.task_entries import task_dataset, task_entry
from furlong.errors import DataError
from furlong.rewards.math_text import last_boxed

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARKS = "\"'`*.,;:!?()[]{}$ \n"


def task_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    r"""Return the task's score of the response, mostly 1.0 if right, and 0.0 or a little more if not.

    The answer is the text in the last `<answer>` tags, else in the last `\boxed{}`, else the best of: the text after
    `</think>`, its last line, and its last word. Raises DataError for a row that is not of a procedural task.
    """
    del label
    key, seed, index = (metadata.get(name) for name in ("reasoning_gym", "seed", "index"))
    if not (isinstance(key, str) and isinstance(seed, int) and isinstance(index, int)):
        raise DataError(
            "the row is not of a task of reasoning-gym; --rm-type reasoning_gym scores the rows of --prompt-data "
            "reasoning-gym:NAME, with --metadata-key"
        )
    entry, dataset = task_entry(key, seed, index), task_dataset(key, seed)
    return max((float(dataset.score_answer(answer, entry)) for answer in answers_from(response)), default=0.0)


def answers_from(response: str) -> list[str]:
    """Return the texts that may be the answer, each once.

    >>> answers_from("So it is <answer> 12 </answer>.")
    ['12']
    >>> answers_from("7 + 5 = 12.")
    ['7 + 5 = 12.', '12']
    """
    final = response.rsplit("</think>", 1)[-1].strip()
    if tagged := _TAGGED.findall(final):
        return [tagged[-1].strip()]
    if (boxed := last_boxed(final)) is not None:
        return [boxed.strip()]
    if not final:
        return []
    last_line = final.splitlines()[-1].strip()
    last_word = last_line.split()[-1].strip(_MARKS) if last_line.split() else ""
    return [text for text in dict.fromkeys((final, last_line, last_word)) if text]
