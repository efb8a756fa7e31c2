"""Links and paths in the documentation point to files, headings and modules that exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")}
    | {*(ROOT / "examples").rglob("*.md")}
)
AT_BUILD = {
    ROOT / "docs" / name for name in ("troubleshooting.md", "configuration.md")
}  # pages that mkdocs generates, and whose anchors it checks
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
FILE = re.compile(
    r"(?<![\w./{-])((?:src|tests|scripts|benchmarks|examples|docs|tools)/[\w./-]*\w|train(?:_async)?\.py)(?![\w*])"
)
MODULE = re.compile(r"(?<![\w./-])furlong((?:\.[a-z_]\w*)+)((?:\.[A-Z]\w*)?)")
PAGE = re.compile(r"\bdocs/[\w./-]+\.(?:md|svg)")
OF_SLIME = {"scripts/models"}
PUBLIC = {"train", "configure", "policy", "get_model_url"}  # functions of the package itself


def anchors(text: str) -> set[str]:
    """The anchors that GitHub, and the site, give a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def has_name(module: str, name: str) -> bool:
    """Whether a module's source binds a name at its top level."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    tree = ast.parse(Path(spec.origin).read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return name in names


def is_module_or_member(path: str) -> bool:
    """Whether `furlong.a.b` is a module, or a name in the module `furlong.a`."""
    home, _, name = path.rpartition(".")
    try:
        return has_name(home, name) or importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    broken: list[str] = []
    for page in PAGES:
        for file, anchor in LINK.findall(CODE.sub("", page.read_text())):
            target = page.parent / file if file else page
            if target.resolve() in AT_BUILD:
                continue
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                broken.append(f"{page.relative_to(ROOT)}: {file}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_a_page_exists(page: Path) -> None:
    paths = {*FILE.findall(page.read_text())} - OF_SLIME
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    names = {f"furlong{path}{member}" for path, member in MODULE.findall(page.read_text())}
    names -= {f"furlong.{name}" for name in PUBLIC}
    assert sorted(name for name in names if not is_module_or_member(name)) == []


def test_every_page_that_the_code_names_exists() -> None:
    sources = [path for folder in ("src", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = {(page, path) for path in sources for page in PAGE.findall(path.read_text()) if path != Path(__file__)}
    assert (
        sorted(f"{path}: {page}" for page, path in named if not (ROOT / page).exists() and ROOT / page not in AT_BUILD)
        == []
    )


def test_a_heading_becomes_the_anchor_that_github_gives_it() -> None:
    assert anchors("# One GPU: `--engine sglang`, twice\n```\n# no heading\n```\n") == {"one-gpu---engine-sglang-twice"}


def test_a_path_or_module_that_does_not_exist_is_reported() -> None:
    assert FILE.findall("see `src/furlong/no_such.py` and tests/unit.") == ["src/furlong/no_such.py", "tests/unit"]
    assert is_module_or_member("furlong.core.algorithms.ALGORITHMS")
    assert not is_module_or_member("furlong.core.algorithms.NOTHING")
    assert not is_module_or_member("furlong.no_such.module")
