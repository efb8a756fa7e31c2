"""What an installed furlong consists of."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "src" / "furlong"


def test_every_non_code_file_is_package_data() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["furlong"]
    packed = {path for pattern in patterns for path in SOURCES.glob(pattern)}
    beside = {p for p in SOURCES.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert beside
    assert beside == packed


def test_the_page_about_the_installation_has_the_versions_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    table = (ROOT / "docs/start/install.md").read_text().partition("## Versions that go together")[2]
    lowest = {
        re.split(r"[\[>=<]", word)[0]: re.split(r"[>=]=", word)[1].partition(",")[0]
        for word in (*project["dependencies"], *extras["ray"], *extras["sglang"], *extras["megatron"])
    }
    for name in ("ray", "sglang", "megatron-core"):
        assert f"{name} {lowest[name]}" in table
    assert f"| {lowest['torch']} to " in table
    assert f"| {lowest['transformers']} or later |" in table
