"""CKPT07, CKPT04, QNT and NUM01 rows: the model folder and the reference's."""

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

COMPLETE_MODEL = "use a complete Hugging Face model folder with --hf-checkpoint"
MOVED = 0.05  # share of a tokenizer's tokens; added tokens are fine


def model_folder(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT07: --hf-checkpoint lacks a config.json of a known family, weights, or a readable tokenizer."""
    folder = context.model_dir
    if folder is None:
        return  # reported with the flags
    try:
        check_folder(folder, weights=True, tokenizer=True)
    except ConfigError as error:
        finding, _, remedy = str(error).partition(". ")
        if remedy == COMPLETE:
            remedy = COMPLETE_MODEL
        yield diagnosis("CKPT07", finding, remedy=remedy, evidence={"folder": str(folder)})
        return
    try:
        config = read_json(folder / "config.json")
        if context.tokenizer is None:
            read_tokenizer(folder)  # raises its problem
    except ConfigError as error:
        yield diagnosis("CKPT07", str(error), remedy=COMPLETE_MODEL, evidence={"folder": str(folder)})
        return
    family = config.get("model_type")
    if family is None or (isinstance(family, str) and not _is_known_family(family)):
        problem = "no model_type" if family is None else f"model_type {family!r}, unknown to the installed transformers"
        yield diagnosis(
            "CKPT07",
            f"{folder / 'config.json'} has {problem}",
            cause="The model is newer than the library, or needs custom code, which is not run.",
            remedy="run `pip install -U transformers`, or use a model of a family that it supports",
            evidence={"folder": str(folder), "model_type": family},
        )


def _is_known_family(name: str) -> bool:
    """Whether transformers lists a model type; True if its list is not found. Does not import transformers."""
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
    """NUM01: a reference model with another vocabulary, so that its log-probs are those of other texts."""
    reference, tokenizer = context.config.checkpoint.ref_load, context.tokenizer
    if reference is None or tokenizer is None or not (Path(reference) / "config.json").is_file():
        return
    folder, cause = Path(reference), "Its log-probs would be those of other texts, or of tokens that it lacks."
    remedy = "use a reference with the tokenizer of --hf-checkpoint, or remove --ref-load"
    config = read_json(folder / "config.json")
    size = (config.get("text_config") or config).get("vocab_size")
    if isinstance(size, int) and size < len(tokenizer):
        finding = f"--ref-load {folder} has {size} tokens, --hf-checkpoint {context.model_dir} {len(tokenizer)}"
        yield diagnosis("NUM01", finding, cause=cause, remedy=remedy, evidence={"vocab_size": size})
        return
    if not (folder / "tokenizer.json").is_file():
        return
    vocab, other = tokenizer.get_vocab(), read_tokenizer(folder).get_vocab()
    moved = [token for token, number in vocab.items() if other.get(token) != number]
    if len(moved) > MOVED * len(vocab):
        yield diagnosis(
            "NUM01",
            f"--ref-load {folder}: {len(moved)} of the {len(vocab)} tokens of --hf-checkpoint {context.model_dir} have "
            f"another id there or none (for example {moved[0]!r})",
            cause=cause,
            remedy=remedy,
            evidence={"moved": len(moved), "tokens": len(vocab)},
        )
