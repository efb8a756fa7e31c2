"""Check and read the files of Hugging Face model folders. Imports no torch."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from furlong.errors import ConfigError

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
COMPLETE = "Give a complete Hugging Face model folder"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
LFS_POINTER = b"version https://git-lfs"  # start of a file from a clone without Git LFS


def check_folder(folder: Path | str, *, weights: bool = False, tokenizer: bool = False) -> Path:
    """Return `folder` if it is a Hugging Face model folder.

    Raises ConfigError with the missing files, similar names that exist, and how to get the files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        names = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        close = difflib.get_close_matches(folder.name, names, n=3)
        hint = f"; {folder.parent} contains {', '.join(close)}" if close else ""
        raise ConfigError(
            f"no such model folder: {folder}{hint}. Give a local folder, not a hub name; "
            f"`hf download {folder} --local-dir DIR` downloads one"
        )
    needed = [("config.json",)]
    needed += [WEIGHT_FILES] if weights else []
    needed += [TOKENIZER_FILES] if tokenizer else []
    present = sorted(p.name for p in folder.iterdir())
    for names in needed:
        if not any(name in present for name in names):
            close = difflib.get_close_matches(names[0], present, n=2, cutoff=0.5)
            hint = (
                f"; closest match: {', '.join(close)}"
                if close
                else f"; it contains {', '.join(present[:8]) or 'nothing'}"
            )
            raise ConfigError(f"{folder} has no {' or '.join(names)}{hint}. {_remedy(folder, names, present)}")
    return folder


def _remedy(folder: Path, missing: tuple[str, ...], present: list[str]) -> str:
    """Return how to get the missing files."""
    pickled = next((name for name in present if name.startswith("pytorch_model") and name.endswith(".bin")), None)
    if missing == WEIGHT_FILES and pickled is not None:
        return (
            f"{pickled} is a pickle, which is not loaded; convert it to safetensors once: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    if "ledger.jsonl" in present:
        return "It is a run directory, not a model; --save-hf writes model folders"
    return COMPLETE


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file does not exist. Raises ConfigError if it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains a {type(content).__name__}, not an object")
    return content


def end_ids(generation: Mapping[str, Any], config_eos: Any, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the ids that end generation: those of generation_config.json or else the config, and the tokenizer's.

    >>> end_ids({"eos_token_id": [5, 6]}, 4, 6)
    (5, 6)
    """
    ids = _as_list(generation.get("eos_token_id")) or _as_list(config_eos)
    return tuple(dict.fromkeys(ids + _as_list(tokenizer_eos)))


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]
