"""Write demonstrations for SFT: `python demonstrations.py FILE`. Most call the tool, the others forget to carry."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from furlong.quickstart import addition as task


def main(file: Path) -> None:
    """Write rows such as {"prompt": "47+85=", "label": "[47+85]=132;132"}."""
    rng = random.Random(0)
    rows: list[dict[str, str]] = []
    for a, b in task.problems(25_600, seed=3):
        with_tool, without = f"[{a}+{b}]={a + b};{a + b}", str(task.sum_without_carry(a, b))
        rows.append({"prompt": f"{a}+{b}=", "label": with_tool if rng.random() < 0.7 else without})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
