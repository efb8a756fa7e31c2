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
