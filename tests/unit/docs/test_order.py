"""Pages of the documentation can be tried one after another in one folder: `run_docs.py --together` really does it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from run_docs import FENCE

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = re.compile(r"output[-_]dir[ =]\"?([\w./-]+)")


def test_no_two_pages_use_one_run_folder_and_a_link_is_made_once():
    blocks = {
        page: [code for language, title, code in FENCE.findall(page.read_text()) if not title.strip()] for page in PAGES
    }
    uses = Counter(folder for codes in blocks.values() for folder in set(RUN.findall("\n".join(codes))))
    assert {folder: count for folder, count in uses.items() if count > 1} == {}
    links = [(page.name, line) for page, codes in blocks.items() for line in "\n".join(codes).splitlines()
             if "symlink(" in line and "exists(" not in line]  # fmt: skip
    assert links == []
