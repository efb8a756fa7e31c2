"""Write the data of the examples: `python examples/sums.py FOLDER`. Prints the path of the quickstart's model."""

from __future__ import annotations

import sys
from pathlib import Path

from furlong.quickstart import addition as task
from furlong.quickstart.quickstart import model_folder


def main(folder: Path) -> None:
    """Write 5,000 training problems and 200 held-out problems, as rows {"prompt": "47+85=", "label": "132"}."""
    folder.mkdir(parents=True, exist_ok=True)
    task.write_prompts(folder / "problems.jsonl", task.problems(5_000, seed=7))
    task.write_prompts(folder / "held_out.jsonl", task.held_out_problems()[:200])
    print(model_folder())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
