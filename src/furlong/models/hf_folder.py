"""Check and read the files of Hugging Face model folders. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from furlong.core.model_config import read_json
from furlong.core.text import abbreviate
from furlong.errors import CheckpointError, ConfigError
from furlong.files.checkpoint_folder import TRACKER

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
COMPLETE = "Give a complete Hugging Face model folder"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
ADDED_FAMILIES = ("kimi_k2", "mimo")  # model types that transformers lacks; see `hf_config`
ADAPTER = "adapter_config.json"  # of a PEFT folder, which has only the difference to a base model
SNAPSHOTS = "snapshots"  # of a folder in the cache of huggingface_hub, with a model folder for each commit
# Ends of the names of quantized weights: compressed-tensors, AWQ and GPTQ, bitsandbytes, FP8, MXFP4.
QUANTIZED_NAMES = (
    *(".weight_packed", ".qweight", ".qzeros", ".weight.absmax", ".weight.quant_state.bitsandbytes__nf4"),
    *(".weight_scale_inv", ".weight_scale", "_proj_blocks"),
)


def check_folder(folder: Path | str, *, weights: bool = False, tokenizer: bool = False) -> Path:
    """Return `folder` if it is a Hugging Face model folder.

    Raises ConfigError with the missing files, similar names that exist, and how to get the files.
    """
    folder = Path(folder)
    if problem := folder_problem(folder, weights=weights, tokenizer=tokenizer):
        raise ConfigError(". ".join(problem))
    return folder


def folder_problem(folder: Path, *, weights: bool = False, tokenizer: bool = False) -> tuple[str, str] | None:
    """Return why a folder is not a Hugging Face model folder, and the remedy; None if it is one."""
    if not folder.is_dir():
        names = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        close = difflib.get_close_matches(folder.name, names, n=3)
        hint = f"; {folder.parent} contains {', '.join(close)}" if close else ""
        remedy = "Give a model folder, or the name of a model on the Hub"
        return f"no such model folder: {folder}{hint}", remedy
    needed = [("config.json",)]
    needed += [WEIGHT_FILES] if weights else []
    needed += [TOKENIZER_FILES] if tokenizer else []
    present = sorted(p.name for p in folder.iterdir())
    for names in needed:
        if not any(name in present for name in names):
            close = difflib.get_close_matches(names[0], present, n=2, cutoff=0.8)
            hint = (
                f"; closest match: {', '.join(close)}"
                if close
                else f"; it contains {', '.join(present[:8]) or 'nothing'}"
            )
            return f"{folder} has no {' or '.join(names)}{hint}", _remedy(folder, names, present)
    return None


def _remedy(folder: Path, missing: tuple[str, ...], present: list[str]) -> str:
    if "ledger.jsonl" in present:
        model = folder / "model"
        use = f"use {model}" if (model / "config.json").is_file() else "--save-hf writes model folders"
        return f"It is a run directory, not a model; {use}"
    snapshots = sorted(path for path in folder.glob(f"{SNAPSHOTS}/*") if (path / "config.json").exists())
    if snapshots:
        return f"It is a folder of the Hub's cache, where each commit of a model has its own; use {snapshots[-1]}"
    if missing == ("config.json",) and len(inside := list(folder.glob("*/config.json"))) == 1:
        return f"A model is one level below; use {inside[0].parent}"
    if ADAPTER in present:
        base = _base_of(folder)
        return (
            f"It is a LoRA adapter, which has only the difference to its base model{f' {base}' if base else ''}; merge "
            "them once with PEFT's merge_and_unload(), save the model and its tokenizer, and use that folder"
        )
    if TRACKER in present:
        return "It is a folder of checkpoints; give it to --load, and the model that training started from here"
    pickled = next((name for name in present if name.startswith("pytorch_model") and name.endswith(".bin")), None)
    if missing == WEIGHT_FILES and pickled is not None:
        return (
            f"{pickled} is a pickle, which is not loaded; convert it to safetensors once: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    if missing == TOKENIZER_FILES:
        return (
            "It has no tokenizer; copy that of the model it was trained from: "
            f"AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(folder)!r})"
        )
    return COMPLETE


def _base_of(folder: Path) -> str:
    try:
        return str(read_json(folder / ADAPTER).get("base_model_name_or_path") or "")
    except ConfigError:
        return ""


def template_file(folder: Path) -> Path:
    """Return the file of a folder that has its chat template."""
    single, settings, older = (folder / name for name in TEMPLATE_FILES)
    if single.is_file():
        return single
    return settings if read_json(settings).get("chat_template") else older


def quantization_seen(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    """Return what shows that a folder's weights are quantized; None if they are not.

    `config` is its config.json, `dtypes` the safetensors dtype of each stored tensor, as far as they are known.
    """
    settings: Any = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    names = [name for name, kind in dtypes.items() if _is_quantized(name, kind)]
    if not settings and not names:
        return None
    method = settings.get("quant_method", "of an unknown method") if isinstance(settings, dict) else "unknown"
    return f"quantization_config in config.json: {method}" if settings else f"{names[0]} is {dtypes[names[0]]}"


def _is_quantized(name: str, kind: str) -> bool:
    """Whether a stored tensor is, or belongs to, a quantized weight. Masks of attention may be integers."""
    return (
        kind.startswith("F8_") or (kind in ("I8", "U8") and name.endswith(".weight")) or name.endswith(QUANTIZED_NAMES)
    )


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor from a safetensors index. Raises ConfigError or CheckpointError if damaged."""
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{index} has no weight_map; download the model again")
    weight_map = cast("dict[str, Any]", entries)
    if outside := [name for name in weight_map.values() if not isinstance(name, str) or Path(name).name != name]:
        raise CheckpointError(f"{index} names files outside of its folder: {abbreviate(outside)}; download it again")
    return weight_map


def end_ids(generation: Mapping[str, Any], config_eos: Any, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the ids that end generation: those of generation_config.json or else the config, and the tokenizer's.

    Raises ConfigError for an id that is not a number.

    >>> end_ids({"eos_token_id": [5, 6]}, 4, 6)
    (5, 6)
    """
    ids = _as_list(generation.get("eos_token_id")) or _as_list(config_eos)
    return tuple(dict.fromkeys(ids + _as_list(tokenizer_eos)))


def _as_list(value: Any) -> list[int]:
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(isinstance(each, int) for each in values):
        raise ConfigError(
            f"eos_token_id is {value!r}, expected a token id or a list of them; correct it in the model's "
            "config.json or generation_config.json"
        )
    return [*values]
