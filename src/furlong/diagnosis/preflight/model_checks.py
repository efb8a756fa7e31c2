"""CKPT07, CKPT04, QNT and NUM01 rows: the model folder, and that of the reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.errors import ConfigError
from furlong.models.hf_folder import COMPLETE, check_folder, read_json
from furlong.tools.model_folder import check_model, completeness, quantization
from furlong.tools.template_test import read_tokenizer

MOVED = 0.05  # of a tokenizer's tokens; one with some tokens added is the same


def model_folder(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT07: --hf-checkpoint has config.json of a known family, weights, and a tokenizer that can be read."""
    folder = context.model_dir
    if folder is None:
        return  # said with the flags
    try:
        check_folder(folder, weights=True, tokenizer=True)
    except ConfigError as error:
        finding, _, way = str(error).partition(". ")
        remedy = "give a complete Hugging Face model folder with --hf-checkpoint" if way == COMPLETE else way
        yield diagnosis("CKPT07", finding, remedy=remedy, evidence={"folder": str(folder)})
        return
    try:
        config = read_json(folder / "config.json")
        if context.tokenizer is None:
            read_tokenizer(folder)  # raises what is wrong with it
    except ConfigError as error:
        finding = str(error)
        remedy = "give a complete Hugging Face model folder with --hf-checkpoint"
        yield diagnosis("CKPT07", finding, remedy=remedy, evidence={"folder": str(folder)})
        return
    family = config.get("model_type")
    if family is None or (isinstance(family, str) and not _is_known_family(family)):
        what = "has no model_type" if family is None else f"says model_type {family!r}, which is not known"
        yield diagnosis(
            "CKPT07",
            f"{folder / 'config.json'} {what} to the installed transformers",
            cause="The model is newer than the library, or needs code of its own, which is not run.",
            remedy="pip install -U transformers, or give a model of a family that it knows",
            evidence={"folder": str(folder), "model_type": family},
        )


def _is_known_family(name: str) -> bool:
    """Whether transformers lists a model type; True if the list cannot be found. transformers is not imported."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return True
    folder = Path(package.origin).parent / "models" / "auto"
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*mapping*.py")]
    texts += [path.read_text(encoding="utf-8") for path in folder.glob("configuration_auto.py")]
    return not texts or any(f'"{name}"' in text for text in texts)


def weights(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT04, QNT01 and QNT02: the model's shards, layers and quantization."""
    folder = context.model_dir
    if context.model is not None:
        yield from completeness(context.model)
        yield from quantization(context.model)
    elif folder is not None and (folder / "config.json").is_file():
        yield from check_model(folder)


def reference_tokens(context: PreflightContext) -> Iterator[Diagnosis]:
    """NUM01: a reference model whose tokens are not the policy's, so that its log-probs are those of other texts."""
    reference, tokenizer = context.config.checkpoint.ref_load, context.tokenizer
    if reference is None or tokenizer is None or not (Path(reference) / "config.json").is_file():
        return
    folder, cause = Path(reference), "Its log-probs would be those of other texts, or of no token at all."
    remedy = "give a reference with the tokenizer of --hf-checkpoint, or leave --ref-load out"
    config = read_json(folder / "config.json")
    size = (config.get("text_config") or config).get("vocab_size")
    if isinstance(size, int) and size < len(tokenizer):
        finding = f"--ref-load {folder} has {size} tokens, --hf-checkpoint {context.model_dir} {len(tokenizer)}"
        yield diagnosis("NUM01", finding, cause=cause, remedy=remedy, evidence={"vocab_size": size})
        return
    if not (folder / "tokenizer.json").is_file():
        return
    own, other = tokenizer.get_vocab(), read_tokenizer(folder).get_vocab()
    moved = [token for token, number in own.items() if other.get(token) != number]
    if len(moved) > MOVED * len(own):
        yield diagnosis(
            "NUM01",
            f"--ref-load {folder}: {len(moved)} of the {len(own)} tokens of --hf-checkpoint {context.model_dir} have "
            f"another number there or none ({moved[0]!r} is one)",
            cause=cause,
            remedy=remedy,
            evidence={"moved": len(moved), "tokens": len(own)},
        )
