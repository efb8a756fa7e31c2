"""Generate the page of diagnoses from the catalogue: a hook of mkdocs, or python scripts/make_troubleshooting.py FILE.

The page is not committed: `furlong doctor --list` and `furlong doctor --explain ID` print the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.catalogue import CATALOGUE, MOMENTS, Row

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PAGE = "troubleshooting.md"

INTRODUCTION = """\
# Troubleshooting

furlong makes these diagnoses itself. `furlong doctor FLAGS` checks a launch command without starting it, and
`furlong train` does the same in its first second: an error stops the launch, a warning is logged and written to
`events.jsonl`. Monitors check every step of a run. `furlong doctor --run DIR` reads the folder of a run that is
running, finished, failed or was killed. `furlong doctor --explain ID` prints one of the rows below.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=render()))
    return files


def render() -> str:
    """Return the page."""
    lines = [INTRODUCTION, "| id | problem | found | severity |", "|---|---|---|---|"]
    for row in CATALOGUE.values():
        anchor = f"{row.id}: {row.title}".lower().replace(" ", "-")
        anchor = "".join(letter for letter in anchor if letter.isalnum() or letter in "-_")
        found = ", ".join(MOMENTS[moment] for moment in row.moments)
        lines.append(f"| [{row.id}](#{anchor}) | {row.title} | {found} | {row.severity} |")
    for row in CATALOGUE.values():
        lines += ["", *section(row)]
    return "\n".join(lines) + "\n"


def section(row: Row) -> list[str]:
    """Return the section of one row."""
    when = " and ".join(MOMENTS[moment] for moment in row.moments)
    also = f" Also in: {', '.join(row.guides)}." if row.guides else ""
    lines = [f"## {row.id}: {row.title}", "", f"Found {when}; {row.severity}.{also}", ""]
    lines += [f"**Symptom:** {row.symptom}", "", f"**Cause:** {row.cause}", "", f"**Checked:** {row.checked}", ""]
    return [*lines, f"**Fix:** {row.remedy}"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
