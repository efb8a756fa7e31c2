"""The flag reference is written from the code, and written again when that changes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from furlong.config import Config
from furlong.config.compat import SLIME
from furlong.config.flag_spec import flag_specs

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_flag_reference", ROOT / "scripts" / "make_flag_reference.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert PAGE.read_text() == script.render(), "run: python scripts/make_flag_reference.py"


def test_the_page_names_every_flag() -> None:
    text = PAGE.read_text()
    flags = [spec.flag for spec in flag_specs(Config).values()] + [name for row in SLIME for name in row.names]
    assert [flag for flag in flags if f"`{flag}`" not in text] == []
