"""Writes the problems of the quickstart into a folder and prints where its model is: `python problems.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from furlong.quickstart import addition as task
from furlong.quickstart.quickstart import model_folder


def main(folder: Path) -> None:
    """Write 5,000 problems to train on, and 200 of those that are held out."""
    task.write_prompts(folder / "problems.jsonl", task.problems(5_000, seed=7))
    task.write_prompts(folder / "held_out.jsonl", task.held_out_problems()[:200])
    print(model_folder())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
