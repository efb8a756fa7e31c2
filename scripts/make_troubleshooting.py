"""Write docs/troubleshooting.md from the doctor's catalogue: python scripts/make_troubleshooting.py [--record].

What the program says about a fault is in tests/faults/transcripts. With --record the tests that inject the faults are
run, and write it there anew.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from furlong.core.catalogue import CATALOGUE, MOMENTS, Row

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "troubleshooting.md"
TRANSCRIPTS = ROOT / "tests" / "faults" / "transcripts"
RECORDED = (
    "tests/faults",
    "tests/chaos/test_engines.py",
    "tests/chaos/test_ray_processes.py",
    "tests/e2e/test_ray.py",
)  # what is said first is kept

INTRODUCTION = """\
# Troubleshooting

<!-- Written by scripts/make_troubleshooting.py from src/furlong/core/catalogue/. Change that. -->

The program makes these diagnoses itself. `furlong doctor FLAGS` checks a launch command without starting it, and
`furlong train` does so in its first second: an error ends it, a warning is logged and written to `events.jsonl`.
Monitors look at every step of a run. `furlong doctor --run DIR` reads the folder of a run that goes on, has ended,
failed or was killed. `furlong doctor --explain ID` shows one of the rows below.

Below each row stands what the program says of its fault, as the test that injects it into a command or a run saw it;
`...` are the flags of a run that is healthy. The test fails where the program says something else than stands here.
`tests/gpu/test_gpu_faults.py` puts faults of memory, kernels and publications into runs on GPUs (MEM01, MEM02, MEM03,
ENG01, SYNC01).
A new diagnosis is one row of the catalogue, one function that finds it, and one test that injects the fault.
"""


def entry(row: Row) -> list[str]:
    """The section of one row."""
    when = " and ".join(MOMENTS[moment] for moment in row.moments)
    also = f" Also in: {', '.join(row.guides)}." if row.guides else ""
    path = TRANSCRIPTS / f"{row.id}.txt"
    head, _, said = path.read_text().rstrip().partition("\n")
    lines = [f"## {row.id}: {row.title}", "", f"Found {when}; {row.severity}.{also}", ""]
    lines += [f"**Seen:** {row.symptom}", "", f"**Cause:** {row.cause}", "", f"**Checked:** {row.checked}", ""]
    lines += [f"**Way out:** {row.remedy}", ""]
    return [*lines, "```text", head, said, "```"]


def record() -> None:
    """Run the tests that inject faults, and keep what the program says."""
    for path in TRANSCRIPTS.glob("*.*"):
        path.unlink()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")])
    }
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "fault_recorder", *RECORDED]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)


def guides() -> list[str]:
    """The table of the entries of other frameworks' guides."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    from faults.guides import ENTRIES

    lines = ["## Entries of other guides", "", "What the guides of slime and Miles answer, and what says it here.", ""]
    lines += ["| guide | seen | said by |", "|---|---|---|"]
    return [*lines, *(f"| {entry.guide} | {entry.seen} | {', '.join(entry.rows)} |" for entry in ENTRIES)]


def reported() -> list[str]:
    """The table of what users of other frameworks reported."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    from faults.symptoms import SYMPTOMS

    lines = [
        "## Reported elsewhere",
        "",
        "What users of such frameworks saw, and what says it here or keeps it away.",
        "",
    ]
    lines += ["| seen | said by | |", "|---|---|---|"]
    for symptom in SYMPTOMS:
        proofs = ", ".join(f"`{name}`" for name in symptom.tests)
        note = "; ".join(filter(None, (symptom.note, proofs and f"shown by {proofs}")))
        lines.append(f"| {symptom.seen} | {', '.join(symptom.rows)} | {note} |")
    return lines


def render() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    lines += ["| id | | found | severity |", "|---|---|---|---|"]
    for row in CATALOGUE.values():
        anchor = f"{row.id}: {row.title}".lower().replace(" ", "-")
        anchor = "".join(letter for letter in anchor if letter.isalnum() or letter in "-_")
        lines.append(f"| [{row.id}](#{anchor}) | {row.title} | {', '.join(row.moments)} | {row.severity} |")
    for row in CATALOGUE.values():
        lines += ["", *entry(row)]
    lines += ["", *guides(), "", *reported()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="run the tests that inject the faults first")
    if parser.parse_args().record:
        record()
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
