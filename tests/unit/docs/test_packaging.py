"""What an installed furlong consists of."""

from __future__ import annotations

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
    torch = next(word for word in project["dependencies"] if word.startswith("torch"))
    transformers = next(word for word in project["dependencies"] if word.startswith("transformers"))
    assert (torch, transformers) == ("torch>=2.11,<2.14", "transformers>=5.12,<6")
    assert "| 2.11 to 2.13 | 5.12 or later |" in table
    assert extras["sglang"][0].replace("==", " ") in table
    assert extras["ray"] == ["ray[default]>=2.52"]
    assert "ray 2.52 or later" in table
    assert extras["megatron"] == ["megatron-core>=0.16.1,<0.20"]
    assert all(f"megatron-core {version}" in table for version in ("0.16.1", "0.17 to 0.19"))
