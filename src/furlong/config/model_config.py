"""The config.json of the model that --hf-checkpoint names, as it is on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def model_config_of(folder: str | None) -> tuple[Path, dict[str, Any]]:
    """The file and what it holds; {} where there is none, which is said with --hf-checkpoint."""
    path = Path(str(folder)) / "config.json"
    return path, json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
