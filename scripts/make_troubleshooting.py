"""Write docs/troubleshooting.md from the doctor's catalogue: python scripts/make_troubleshooting.py.

What the program said about a fault is in tests/faults/transcripts, written there by the tests that inject it:
FURLONG_RECORD_TRANSCRIPTS=1 pytest tests/faults.
"""

from __future__ import annotations

from pathlib import Path

from furlong.doctor.catalogue import CATALOGUE, MOMENTS, Row

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "troubleshooting.md"
TRANSCRIPTS = ROOT / "tests" / "faults" / "transcripts"

INTRODUCTION = """\
# Troubleshooting

<!-- Written by scripts/make_troubleshooting.py from src/furlong/doctor/catalogue/. Change that. -->

The program makes these diagnoses itself. `furlong doctor FLAGS` checks a launch command without starting it, and
`furlong train` does so in its first second: an error ends it, a warning is logged and written to `events.jsonl`.
Monitors look at every step of a run. `furlong doctor --run DIR` reads the folder of a run that goes on, has ended,
failed or was killed. `furlong doctor --explain ID` shows one of the rows below.

A new diagnosis is one row of the catalogue and one test that injects the fault.
"""


def entry(row: Row) -> list[str]:
    """The section of one row."""
    when = " and ".join(MOMENTS[moment] for moment in row.moments)
    also = f" Also in: {', '.join(row.guides)}." if row.guides else ""
    path = TRANSCRIPTS / f"{row.id}.txt"
    said = path.read_text().rstrip().splitlines() if path.is_file() else []
    lines = [f"## {row.id}: {row.title}", "", f"Found {when}; {row.severity}.{also}", ""]
    lines += [f"**Seen:** {row.symptom}", "", f"**Cause:** {row.cause}", "", f"**Checked:** {row.checked}", ""]
    lines += [f"**Way out:** {row.way_out}", ""]
    return lines + (["```text", *said, "```"] if said else ["Transcript: recorded on a GPU machine: none yet."])


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
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
