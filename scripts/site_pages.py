"""Hooks of mkdocs for all pages: flags do not break after their hyphens, and the search ranks guides first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

INLINE_CODE = re.compile(r"<code>[^<\n]+</code>")
FLAG = re.compile(r"(?<![\w-])--\w+")
BOOST = {"start": 4, "guides": 4, "internals": 0.25}  # of a folder in the search; others have 1


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Set the rank of a page in the search by its folder, which Material reads from the page's metadata."""
    folder = page.file.src_uri.partition("/")[0]
    page.meta.setdefault("search", {}).setdefault("boost", BOOST.get(folder, 1))
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with the first word of each inline flag in its own element."""
    return INLINE_CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)
