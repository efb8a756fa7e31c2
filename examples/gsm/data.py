"""Write grade-school word problems: `python examples/gsm/data.py FOLDER`. Needs reasoning-gym; nothing is downloaded.

train.jsonl has 3,000 problems of reasoning-gym's gsm_symbolic (templates of GSM8K with other names and numbers),
held_out.jsonl 200 others. Rows: {"prompt": [{"role": "user", "content": ...}], "label": "288"}.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

try:
    import reasoning_gym
except ModuleNotFoundError:
    sys.exit("the problems are written by the package reasoning-gym, which is not installed; pip install reasoning-gym")

REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def problems(size: int, seed: int) -> list[dict[str, Any]]:
    """Return `size` rows, the same for the same seed."""
    return [
        {"prompt": [{"role": "user", "content": entry["question"].strip() + REQUEST}], "label": str(entry["answer"])}
        for entry in reasoning_gym.create_dataset("gsm_symbolic", size=size, seed=seed)
    ]


def main(folder: Path) -> None:
    """Write both files; no problem is in both."""
    folder.mkdir(parents=True, exist_ok=True)
    train = problems(3_000, seed=1)
    seen = {row["prompt"][0]["content"] for row in train}
    held_out = islice((row for row in problems(300, seed=99) if row["prompt"][0]["content"] not in seen), 200)
    for name, rows in ("train", train), ("held_out", held_out):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
