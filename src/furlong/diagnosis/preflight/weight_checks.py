"""CKPT04, CKPT07, QNT and NUM01 rows: the folders whose weights the run loads, and their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.evaluation import used_eval_specs
from furlong.config.facts import further_models, read_model_config
from furlong.core.garbage import import_without_gc
from furlong.core.model_config import read_json
from furlong.core.text import abbreviate
from furlong.data.prompt import syntax_problem
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.diagnosis.preflight.flag_checks import from_problem
from furlong.diagnosis.preflight.model_checks import folder_problems
from furlong.errors import CheckpointError, ConfigError
from furlong.files.checkpoint_folder import DIST_INDEX, find_foreign_weights
from furlong.models.hf_folder import (
    TOKENIZER_FILES,
    folder_problem,
    quantization_seen,
    template_file,
)
from furlong.models.tokenizer import load_tokenizer
from furlong.tools.model_folder import StoredModel, check_model, completeness, has_same_values, quantization, read_model

MOVED = 0.05  # share of a tokenizer's tokens; added tokens are fine
SHOWN = 3
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLE = "embed_tokens.weight"  # end of the embedding's name


@dataclass(frozen=True)
class _Weights:
    """A folder that weights are loaded from, and the flag that names it."""

    flag: str
    folder: Path
    known: StoredModel | None = None

    @cached_property
    def model(self) -> StoredModel | None:
        """Its headers and config.json; None if they cannot be read."""
        if self.known is not None:
            return self.known
        try:
            return read_model(self.folder)
        except (ConfigError, CheckpointError):
            return None


def _foreign(context: PreflightContext) -> list[_Weights]:
    flags = context.config.checkpoint
    frozen = ((model.flag, model.load, model.step) for model in further_models(context.config))
    named = ("--load", flags.load, flags.ckpt_step), *frozen
    found: list[_Weights] = []
    for flag, folder, step in named:
        if folder is None or not Path(folder).is_dir() or (Path(folder) / "ledger.jsonl").is_file():
            continue  # reported with the flags, or as the folder of a run
        foreign = find_foreign_weights(Path(folder), step=step)
        if foreign is not None and foreign != context.model_dir:
            found.append(_Weights(flag, foreign))
    return found


def _models(context: PreflightContext) -> list[_Weights]:
    own = [] if context.model_dir is None else [_Weights("--hf-checkpoint", context.model_dir, context.model)]
    own = [each for each in own if (each.folder / "config.json").is_file()]
    return own + [each for each in _foreign(context) if not (each.folder / DIST_INDEX).is_file()]


def weights(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT04: shards and layers of every model that the run loads, by headers; QNT rows: quantized weights."""
    for each in _models(context):
        if problem := folder_problem(each.folder, weights=True):
            if each.flag != "--hf-checkpoint":  # else reported by model.model_folder
                finding, remedy = problem
                evidence = {"folder": str(each.folder)}
                yield diagnosis("CKPT07", f"{each.flag}: {finding}", remedy=remedy, evidence=evidence)
            continue
        if each.model is None:
            yield from check_model(each.folder)
            continue
        yield from completeness(each.model)
        yield from _experts(each.model)
        if quantization_seen(each.model.config, {name: t.dtype for name, t in each.model.tensors.items()}) is not None:
            found = list(quantization(each.model))
            yield from found
            problem = _quantized_problem(context, each, each.model)
            if problem and not (found and "are missing:" in problem):
                yield from_problem(problem, {"folder": str(each.folder)}, "QNT03")


def _experts(model: StoredModel) -> Iterator[Diagnosis]:
    chosen = model.text_config.get("num_experts_per_tok")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = model.text_config.get(name)
        if isinstance(count, int) and isinstance(chosen, int) and chosen > count > 0:
            yield diagnosis(
                "CKPT04",
                f"{model.folder}/config.json: num_experts_per_tok {chosen} is more than {name} {count}",
                cause="config.json was edited or belongs to another model.",
                remedy="use the config.json that belongs to these weights",
            )


def _quantized_problem(context: PreflightContext, each: _Weights, model: StoredModel) -> str:
    with import_without_gc("furlong.models.quantized_folder"):
        from furlong.models import quantized_folder as quantized  # imports torch

    config, dtypes = context.config, {name: tensor.dtype for name, tensor in model.tensors.items()}
    try:
        scheme = quantized.scheme_of(each.folder, model.config, dtypes)
        assert scheme is not None
        shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
        if not scheme.is_fixed and (misfits := scheme.misfits(shapes)):
            return (
                f"{each.flag} {each.folder}: {len(misfits)} tensors are not those of {scheme.form.description}: "
                f"{abbreviate(misfits, SHOWN)}; use the config.json that was written with them"
            )
        if config.debug.debug_rollout_only:
            return ""
        has_engine = not config.debug.debug_train_only and (context.generates or bool(used_eval_specs(config)))
        problem = quantized.update_problem(each.folder, scheme) if each.flag == "--hf-checkpoint" else None
        if problem is not None and has_engine:
            return problem
        if config.checkpoint.dequantize:
            return ""
        trained = quantized.trainer_folders(config, context.model_dir or each.folder)
    except ConfigError as error:
        return f"{each.flag} {error}"
    except CheckpointError:  # reported with the checkpoint
        return ""
    is_trained = each.folder in trained.values()
    return (quantized.training_problem(each.flag, each.folder, model.config, dtypes) or "") if is_trained else ""


def folder_findings(folder: Path) -> list[Diagnosis]:
    """Judge a Hugging Face folder with intact weights as a run does that names it with --hf-checkpoint.

    A folder without a tokenizer, which --load and --ref-load accept, gets a note. Raises as `folder_shapes`.
    """
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    problems = list(folder_problems(folder, needs_tokenizer=has_tokenizer))
    if problems:
        return problems
    model, tokenizer = read_model(folder), load_tokenizer(folder) if has_tokenizer else None
    if tokenizer is None:
        problems.append(
            diagnosis(
                "CKPT07",
                f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)})",
                cause="It is enough for --load and --ref-load, but not for --hf-checkpoint.",
                remedy="copy the tokenizer files of the original model into it",
                severity="info",
            )
        )
    else:
        problems += _tokens_without_row(model, tokenizer)
        if problem := syntax_problem(tokenizer):
            remedy = "correct that line, or set another template with --chat-template-path"
            problems.append(
                diagnosis("TPL01", f"the chat template in {template_file(folder)} {problem}", remedy=remedy)
            )
    return [*problems, *_separate_head("", model), *folder_shapes(folder)]


def folder_shapes(folder: Path) -> list[Diagnosis]:
    """Compare the tensors of a Hugging Face folder, quantized or not, with config.json, as the run does.

    Raises ConfigError and CheckpointError for a folder that cannot be read, or whose quantization is not supported.
    """
    with import_without_gc("furlong.models.quantized_folder"):
        from furlong.models.quantized_folder import scheme_of  # imports torch

    model = read_model(folder)
    scheme = scheme_of(folder, model.config, {name: tensor.dtype for name, tensor in model.tensors.items()})
    shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
    return list(_shapes(model, shapes if scheme is None else scheme.whole_shapes(shapes)))


def _shapes(model: StoredModel, stored: Mapping[str, tuple[int, ...]]) -> Iterator[Diagnosis]:
    with import_without_gc("furlong.models.hf_model"):
        from furlong.models.hf_model import misfits  # imports torch

    try:
        missing, shapes = misfits(model.folder, stored)
    except ConfigError as error:
        yield from_problem(str(error), {"folder": str(model.folder)}, "CKPT07")
        return
    other = [f"{name} is {list(actual)}, expected {list(needed)}" for name, (actual, needed) in shapes.items()]
    parts = [f"{len(missing)} tensors are missing: {abbreviate(missing, SHOWN)}"] if missing else []
    parts += [f"{len(other)} tensors have another shape: {'; '.join(other[:SHOWN])}"] if other else []
    if parts:
        yield diagnosis(
            "CKPT04",
            f"{model.folder}: the weights do not fit config.json: {'; '.join(parts)}",
            cause="config.json was edited or belongs to another model, or a conversion left tensors out.",
            remedy=f"use the config.json that belongs to these weights, or download {model.folder} again",
            evidence={"folder": str(model.folder), "missing": missing[:SHOWN], "shapes": other[:SHOWN]},
        )


def tied_head(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT03: an output layer that differs from the embedding, although config.json ties them."""
    for each in _models(context):
        if each.model is not None:
            yield from _separate_head(each.flag, each.model)


def _separate_head(flag: str, model: StoredModel) -> Iterator[Diagnosis]:
    if not model.text_config.get("tie_word_embeddings"):
        return
    head, table = (next((n for n in model.tensors if n.endswith(end)), None) for end in (HEAD, TABLE))
    if head is not None and table is not None and not has_same_values(model, head, table):
        yield diagnosis(
            "CKPT03",
            f"{flag} {model.folder}".lstrip() + f": config.json has tie_word_embeddings true, but {head} is stored "
            f"beside {table} with other values",
            cause="Trainer and engine may use different ones of the two as the output layer.",
            remedy='set "tie_word_embeddings": false in config.json if the model was trained with both; otherwise '
            f"remove {head} from the files",
            evidence={"folder": str(model.folder), "head": head, "embedding": table},
        )


def embedding(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT04: tokens of the tokenizer without a row in the embedding."""
    if context.model is not None and context.tokenizer is not None:
        prompts = context.rows.prompts if context.rows is not None else []
        yield from _tokens_without_row(context.model, context.tokenizer, {n for p in prompts for n in p.tokens})


def _tokens_without_row(
    model: StoredModel, tokenizer: Any, in_prompts: frozenset[int] | set[int] = frozenset()
) -> Iterator[Diagnosis]:
    table = model.tensors.get(EMBEDDING)
    size = table.shape[0] if table is not None and table.shape else model.text_config.get("vocab_size")
    if not isinstance(size, int):
        return
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= size)
    if not beyond:
        return
    used = sorted(number for number in in_prompts if number >= size)
    first, token = beyond[0]
    yield diagnosis(
        "CKPT04",
        f"{model.folder}: the embedding has {size} rows, but the tokenizer has {len(beyond)} tokens with ids of "
        f"{size} or more (the first is {token!r}, {first})"
        + (f", and prompts contain them ({abbreviate([str(each) for each in used], SHOWN)})" if used else ""),
        cause="The tokenizer belongs to another model, or tokens were added without resizing the embedding.",
        remedy="use the model's own tokenizer files, or resize the embedding once (resize_token_embeddings) and save "
        "the model",
        severity=None if used or len(beyond) > MOVED * size else "warning",
        evidence={"rows": size, "num_beyond": len(beyond), "used": used[:SHOWN]},
    )


def frozen_tokens(context: PreflightContext) -> Iterator[Diagnosis]:
    """NUM01, NUM07, OPD01: a reference, critic or teacher with another vocabulary, which reads other texts."""
    names = {"ref": ("NUM01", "reference"), "critic": ("NUM07", "critic"), "teacher": ("OPD01", "teacher")}
    for model in further_models(context.config):
        folder, (row, name) = Path(model.load), names[model.role]
        if context.tokenizer is not None and all((folder / n).is_file() for n in ("config.json", "tokenizer.json")):
            remedy = f"use a {name} with the tokenizer of --hf-checkpoint, or remove {model.flag}"
            other = load_tokenizer(folder)
            yield from moved_tokens(row, f"{model.flag} {folder}", context.tokenizer, other, remedy, share=MOVED)


def moved_tokens(
    row: str, name: str, tokenizer: Any, other: Any, remedy: str, *, share: float = 0.0
) -> Iterator[Diagnosis]:
    """Compare the ids of the policy's tokens in another tokenizer; more than `share` of them may not differ."""
    vocab, ids = tokenizer.get_vocab(), other.get_vocab()
    moved = sorted(token for token, number in vocab.items() if ids.get(token) != number)
    if len(moved) > share * len(vocab):
        yield diagnosis(
            row,
            f"{name}: {len(moved)} of the {len(vocab)} tokens of --hf-checkpoint have another id there or none (for "
            f"example {moved[0]!r})",
            cause="It would read other texts, or tokens that it lacks.",
            remedy=remedy,
            evidence={"moved": len(moved), "tokens": len(vocab)},
        )


# Sizes of a model that a Megatron-core layout is built for.
LAYOUT_KEYS = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "num_experts"),
)


def teacher_sizes(context: PreflightContext) -> Iterator[Diagnosis]:
    """OPD01: a teacher that cannot be built in the policy's layout."""
    config, load = context.config, context.config.opd.opd_teacher_load
    if not config.opd.has_teacher_model or load is None or not (Path(load) / "config.json").is_file():
        return
    teacher, policy = read_json(Path(load) / "config.json"), read_model_config(config)
    if config.train.train_backend == "megatron":
        different = [key for key in LAYOUT_KEYS if teacher.get(key) != policy.get(key)]
        if different and policy:
            each = ", ".join(f"{key} {teacher.get(key)} and not {policy.get(key)}" for key in different)
            yield diagnosis(
                "OPD01",
                f"--opd-teacher-load {load} is another architecture than --hf-checkpoint {context.model_dir}: {each}",
                cause="With --train-backend megatron, teacher and policy share one parallel layout.",
                remedy="use --train-backend fsdp, or serve the teacher and name it with --opd-teacher-urls",
                evidence={"different": different},
            )


CHECKS = (weights, embedding, tied_head, frozen_tokens, teacher_sizes)
