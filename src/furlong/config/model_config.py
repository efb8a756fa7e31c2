"""The config.json of the model that --hf-checkpoint names, as it is on disk, and what such files leave to the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# gpt-oss' gated activation: the bound of its inputs, where config.json names no `swiglu_limit`, and one's offset.
GPT_OSS_CLAMP, GPT_OSS_OFFSET = 7.0, 1.0


def model_config_of(folder: str | None) -> tuple[Path, dict[str, Any]]:
    """The file and what it holds; {} where there is none, which is said with --hf-checkpoint."""
    path = Path(str(folder)) / "config.json"
    return path, json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
