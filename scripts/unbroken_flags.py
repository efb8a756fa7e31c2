"""A hook of mkdocs: browsers do not break a flag in running text after its leading hyphens."""

from __future__ import annotations

import re
from typing import Any

INLINE_CODE = re.compile(r"<code>[^<\n]+</code>")
FLAG = re.compile(r"(?<![\w-])--\w+")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with the first word of each inline flag in an element of its own."""
    return INLINE_CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)
