"""Write the quickstart's problems to a folder and print the path of its model: `python problems.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from furlong.quickstart import addition as task
from furlong.quickstart.quickstart import model_folder


def main(folder: Path) -> None:
    """Write 5,000 training problems and 200 held-out problems."""
    task.write_prompts(folder / "problems.jsonl", task.problems(5_000, seed=7))
    task.write_prompts(folder / "held_out.jsonl", task.held_out_problems()[:200])
    print(model_folder())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
