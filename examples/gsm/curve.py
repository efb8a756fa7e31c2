"""Write curve.csv and curve.svg of a run, with the expected curve beside it: `python curve.py RUN_FOLDER EXPECTED.csv`.

The columns are those of curve.csv in this folder.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from furlong.tracking.curves import Panel, svg_of
from furlong.tracking.run_files import read_steps

METRIC = "eval/held_out"


def main(run: Path, expected_file: Path) -> None:
    """Write both files, and print the accuracy before and after."""
    with expected_file.open() as file:
        expected = [(int(step), float(share)) for step, share in list(csv.reader(file))[1:]]
    points = [(step, row[METRIC]) for step, row in read_steps(run) if METRIC in row]
    (run / "curve.csv").write_text("step,held_out\n" + "".join(f"{step},{share:.3f}\n" for step, share in points))
    (run / "curve.svg").write_text(svg_of([Panel("held-out accuracy", {"this run": points, "expected": expected})]))
    print(f"held-out accuracy: {points[0][1]:.1%} before, {points[-1][1]:.1%} after; {run / 'curve.svg'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
