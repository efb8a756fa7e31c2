"""Write the index, questions and demonstrations: `python make_data.py FOLDER`. Prints the path of the model."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from search import facts, write_index

from furlong.quickstart.quickstart import model_folder

ASKS = 0.6  # of the demonstrations; the others guess


def main(folder: Path) -> None:
    """Write facts.db, questions.jsonl and demonstrations.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    write_index(folder / "facts.db")
    rng, known = random.Random(1), facts()
    questions = [{"prompt": f"capital of {name}?", "label": capital} for name, capital in known.items()]
    rows: list[dict[str, Any]] = []
    for name in rng.choices(list(known), k=9_600):
        found, guess = known[name], known[rng.choice(list(known))]
        turns = [f"[{name}]", f"{name}: {found}", found] if rng.random() < ASKS else [guess]
        roles = ["assistant", "user", "assistant"]
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        rows.append({"prompt": [{"role": "user", "content": f"capital of {name}?"}, *messages]})
    for file, data in (("questions.jsonl", questions), ("demonstrations.jsonl", rows)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in data))
    print(model_folder())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
