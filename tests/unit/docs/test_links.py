"""Links of the documentation: every file is there, and every heading that one points at."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    broken: list[str] = []
    for page in PAGES:
        for file, anchor in LINK.findall(CODE.sub("", page.read_text())):
            target = page.parent / file if file else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                broken.append(f"{page.relative_to(ROOT)}: {file}#{anchor}")
    assert broken == []


def test_a_heading_becomes_the_anchor_that_github_gives_it() -> None:
    assert anchors("# One GPU: `--engine sglang`, twice\n```\n# no heading\n```\n") == {"one-gpu---engine-sglang-twice"}
