"""Write conversations for SFT: `python demonstrations.py FILE`. Some ask the calculator, the others forget to carry."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from furlong.quickstart import addition as task

ASKS = 0.7


def main(file: Path) -> None:
    """Write rows such as {"prompt": [user 47+85=, assistant [47+85], user 132, assistant 132]}."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for a, b in task.problems(9_600, seed=3):
        asks, total = rng.random() < ASKS, str(a + b)
        turns = [f"[{a}+{b}]", total, total] if asks else [str(task.sum_without_carry(a, b))]
        roles = ["assistant", "user", "assistant"]
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        rows.append({"prompt": [{"role": "user", "content": f"{a}+{b}="}, *messages]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
