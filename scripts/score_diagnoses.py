"""Print the score of diagnoses in docs/internals/evidence.md: python scripts/score_diagnoses.py [ID ...].

Faults of launch commands, metrics, events and logs, and healthy settings, from tests/faults/score_*.py: for each row of
the catalogue, how many faults were named, how many with the right fix, and how many got a false second diagnosis. Below
the table is a line for each case that is not entirely right. With ids, only the faults of these rows; `healthy` stands
for the healthy settings, to which FURLONG_REAL_MODEL=DIR adds those of a real instruct model.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the cases and print the tables; the exit code is 0 whatever the score is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ids", nargs="*", help="rows of the catalogue, or `healthy`; default: all")
    wanted = {id.upper() for id in parser.parse_args(argv).ids}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

    from diagnosis_score import healthy_line, judge_all, score_table, wrong_lines
    from faults.score_cases import FAULTS, SETTINGS
    from faults_marker import injected

    started = time.perf_counter()
    cases = [*FAULTS, *SETTINGS]
    with tempfile.TemporaryDirectory(prefix="furlong-score-") as folder:
        outcomes = judge_all(
            [case for case in cases if not wanted or wanted & {*(case.rows or ("HEALTHY",))}], Path(folder)
        )
    tests = {id: len(names) for id, names in injected().items() if not wanted or id in wanted}
    print("\n".join(score_table(outcomes, tests)))
    print(f"\n{healthy_line(outcomes)} ({time.perf_counter() - started:.0f} s)\n")
    print("\n".join(f"- {line}" for line in wrong_lines(outcomes)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
