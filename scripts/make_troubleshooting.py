"""Generate docs/troubleshooting.md from the catalogue of diagnoses: python scripts/make_troubleshooting.py [--record].

The recorded messages are in tests/faults/transcripts. With --record, the fault injection tests run first and rewrite
them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from furlong.catalogue import CATALOGUE, MOMENTS, Row

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "troubleshooting.md"
TRANSCRIPTS = ROOT / "tests" / "faults" / "transcripts"
RECORDED = (
    "tests/faults",
    "tests/chaos/test_engines.py",
    "tests/chaos/test_ray_processes.py",
    "tests/e2e/test_ray.py",
)

INTRODUCTION = """\
# Troubleshooting

<!-- Written by scripts/make_troubleshooting.py from src/furlong/catalogue/. Change that. -->

furlong makes these diagnoses itself. `furlong doctor FLAGS` checks a launch command without starting it, and
`furlong train` does the same in its first second: an error stops the launch, a warning is logged and written to
`events.jsonl`. Monitors check every step of a run. `furlong doctor --run DIR` reads the folder of a run that is
running, finished, failed or was killed. `furlong doctor --explain ID` prints one of the rows below.

Each row ends with the program's own message, recorded by the test that injects the fault into a command or a run; `...`
stands for the flags of a healthy run. The test fails if the message changes. `tests/gpu/test_gpu_faults.py` injects
faults of memory, kernels and weight updates into runs on GPUs (MEM01, MEM02, MEM03, ENG01, SYNC01). A new diagnosis is
one row of the catalogue, one function that finds it, and one test that injects the fault.
"""


def entry(row: Row) -> list[str]:
    """Return the page section for one row."""
    when = " and ".join(MOMENTS[moment] for moment in row.moments)
    also = f" Also in: {', '.join(row.guides)}." if row.guides else ""
    path = TRANSCRIPTS / f"{row.id}.txt"
    head, _, said = path.read_text().rstrip().partition("\n")
    lines = [f"## {row.id}: {row.title}", "", f"Found {when}; {row.severity}.{also}", ""]
    lines += [f"**Symptom:** {row.symptom}", "", f"**Cause:** {row.cause}", "", f"**Checked:** {row.checked}", ""]
    lines += [f"**Fix:** {row.remedy}", ""]
    return [*lines, "```text", head, said, "```"]


def record() -> None:
    """Run the fault injection tests, which record the program's messages."""
    for path in TRANSCRIPTS.glob("*.txt"):
        if path.stem not in CATALOGUE:
            path.unlink()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")])
    }
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "fault_recorder", *RECORDED]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)


def guides() -> list[str]:
    """Return the table of entries in other frameworks' guides."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    from faults.guides import ENTRIES

    lines = ["## Entries of other guides", "", "Entries of the guides of slime and Miles, and their rows here.", ""]
    lines += ["| guide | symptom | row |", "|---|---|---|"]
    return [*lines, *(f"| {entry.guide} | {entry.seen} | {', '.join(entry.rows)} |" for entry in ENTRIES)]


def reported() -> list[str]:
    """Return the table of issues that users of other frameworks reported."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    from faults.symptoms import SYMPTOMS

    lines = [
        "## Reported elsewhere",
        "",
        "What users of other frameworks reported, and what reports or prevents it here.",
        "",
    ]
    lines += ["| symptom | row | note |", "|---|---|---|"]
    for symptom in SYMPTOMS:
        tests = ", ".join(f"`{name}`" for name in symptom.tests)
        note = "; ".join(filter(None, (symptom.note, tests and f"tested by {tests}")))
        lines.append(f"| {symptom.seen} | {', '.join(symptom.rows)} | {note} |")
    return lines


def render() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    lines += ["| id | problem | found | severity |", "|---|---|---|---|"]
    for row in CATALOGUE.values():
        anchor = f"{row.id}: {row.title}".lower().replace(" ", "-")
        anchor = "".join(letter for letter in anchor if letter.isalnum() or letter in "-_")
        found = ", ".join(MOMENTS[moment] for moment in row.moments)
        lines.append(f"| [{row.id}](#{anchor}) | {row.title} | {found} | {row.severity} |")
    for row in CATALOGUE.values():
        lines += ["", *entry(row)]
    lines += ["", *guides(), "", *reported()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--record", action="store_true", help="first run the fault injection tests and record their messages"
    )
    if parser.parse_args().record:
        record()
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
