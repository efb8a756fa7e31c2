"""Write conversations for SFT: `python demonstrations.py FILE`. Solvers often forget to carry; verifiers guess."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from furlong.quickstart import addition as task


def main(file: Path) -> None:
    """Write rows {"prompt": [user 47+85=, assistant 22]} and {"prompt": [user 47+85=22?, assistant n]}."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for a, b in task.problems(9_600, seed=3):
        answer = str(a + b) if rng.random() < 0.5 else str(task.sum_without_carry(a, b))
        pairs = [(f"{a}+{b}=", answer), (f"{a}+{b}={answer}?", rng.choice("yn"))]
        for question, reply in pairs:
            rows.append({"prompt": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
