"""Checks of teachers: whether those on servers answer, and whether all read the policy's texts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.engine_groups import served_models
from furlong.config.evaluation import used_eval_specs
from furlong.config.facts import read_model_config
from furlong.config.sections import Config
from furlong.config.teachers import ASKS, TeacherSpec, teacher_of, teacher_specs
from furlong.core.model_config import read_json
from furlong.core.text import abbreviate
from furlong.data.prompt import can_render, render_chat
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.diagnosis.preflight.machine_checks import unusable_engine
from furlong.diagnosis.preflight.weight_checks import moved_tokens
from furlong.errors import ConfigError, DataError, EngineError
from furlong.models.hf_config import context_length
from furlong.models.tokenizer import load_tokenizer

QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
SHOWN_CHARS = 60

logger = logging.getLogger(__name__)


def teachers(context: PreflightContext) -> Iterator[Diagnosis]:
    """OPD01, OPD04, ENG05: a teacher of other texts or another temperature than the policy, or one that is down."""
    config = context.config
    if context.problems:
        return
    load = config.opd.opd_teacher_load
    if config.opd.has_teacher_model and load is not None and (Path(load) / "tokenizer.json").is_file():
        config_json = read_json(Path(load) / "config.json")
        length = (config_json.get("text_config") or config_json).get("max_position_embeddings")
        yield from _room(context, "in the trainer", length)
        yield from _rows(context, f"--opd-teacher-load {load}", load)
        if context.tokenizer is not None:
            yield from _template(context, "in the trainer", load, load_tokenizer(load))
    if not (specs := teacher_specs(config)) or not context.generates:
        return
    from furlong.inference.sglang.server import ServerInfo, probe  # imports torch

    key = config.cluster.sglang_api_key
    folders = {model.name: model.path for model in served_models(config)}
    yield from _evaluations(config)
    _check_names(context, [spec.name for spec in specs])
    _check_prompts(context)
    for spec in specs:
        folder, info = spec.folder or folders.get(spec.name), None
        if spec.url is not None:
            try:
                info = ServerInfo.read(probe(spec.url, api_key=key))
            except (ConfigError, EngineError) as error:
                yield unusable_engine(f"teacher {spec.name}: {error}")
                continue
            with contextlib.suppress(ConfigError):  # the texts are compared by /tokenize instead
                folder = str(probe(spec.url, api_key=key, path="/model_info").get("tokenizer_path") or "")
        length = info.context_len if info is not None else context_length(Path(folder)) if folder else None
        yield from _room(context, spec.name, length)
        temperature = config.rollout.rollout_temperature
        is_exact = spec.folder is not None or (info is not None and info.is_furlong)
        if temperature not in (0, 1) and not is_exact:
            yield diagnosis(
                "OPD04",
                f"the teacher {spec.name} returns log-probs at temperature 1, and --rollout-temperature is "
                f"{temperature:g}",
                cause="SGLang's log-probs of given tokens have no temperature, so the KL to the teacher has another "
                "minimum than the teacher.",
                remedy="use --rollout-temperature 1, or a teacher of `furlong serve` or in this process (NAME=FOLDER)",
                severity="warning",
                evidence={"teacher": spec.name, "temperature": temperature},
            )
        if spec.tokenizer is None and context.tokenizer is not None:
            yield from _texts(context, spec, folder)


def _evaluations(config: Config) -> Iterator[Diagnosis]:
    path = config.reward.custom_rm_path or ""
    with contextlib.suppress(ConfigError):  # reported by flags.evaluation_sets
        specs = used_eval_specs(config) if path.endswith(ASKS) else ()
        for name in [each.name for each in specs if each.config.reward.custom_rm_path == path]:
            yield diagnosis(
                "REW01",
                f"evaluation set {name} is scored by --custom-rm-path {path}, whose rewards are 0",
                cause="It is a function for training on a teacher's log-probs.",
                remedy="give the set an rm_type in --eval-config, or remove it",
                severity="warning",
            )


def _check_names(context: PreflightContext, names: list[str]) -> None:
    key = context.config.opd.opd_teacher_key
    for prompt in context.rows.prompts if context.rows is not None else ():
        if teacher_of(given := prompt.metadata.get(key), names) is None:
            raise DataError(
                f"row {prompt.row}: metadata.{key} is {given!r}; the teachers are {abbreviate(names)}: add it to "
                "--opd-teacher-urls, or correct the row"
            )


def _check_prompts(context: PreflightContext) -> None:
    config, rows = context.config, context.rows
    key = config.opd.opd_teacher_prompt_key
    own = (config.rollout.custom_generate_function_path, config.session.agent_function_path, config.session.environment)
    if key is None or rows is None or not rows.prompts or any(own):
        return
    if not any(prompt.metadata.get(key) for prompt in rows.prompts):
        have = abbreviate(sorted({name for prompt in rows.prompts for name in prompt.metadata})) or "none"
        raise DataError(
            f"--opd-teacher-prompt-key {key}: no row has metadata.{key}, and the teacher would see the policy's "
            f"prompts; the keys of metadata are {have}: use one of them, or add {key} to the rows"
        )
    for prompt in rows.prompts:
        if not isinstance(given := prompt.metadata.get(key), str | list | None):
            raise DataError(
                f"row {prompt.row}: metadata.{key} (--opd-teacher-prompt-key) is {given!r} of type "
                f"{type(given).__name__}; make it text or a list of messages"
            )


def _room(context: PreflightContext, name: str, length: int | None) -> Iterator[Diagnosis]:
    rollout, rows = context.config.rollout, context.rows
    needed = rollout.rollout_max_context_len
    if needed is None and rollout.rollout_max_response_len:
        longest = max((len(prompt.tokens) for prompt in rows.prompts), default=0) if rows is not None else 0
        needed = (rollout.rollout_max_prompt_len or longest) + rollout.rollout_max_response_len
    is_loaded = context.config.opd.has_teacher_model
    if length is not None and needed is not None and length < needed + (not is_loaded):
        longer = "use one with a longer context" if is_loaded else f"serve it with --context-length {needed + 1}"
        yield diagnosis(
            "OPD01",
            f"the teacher {name} has a context of {length} tokens, and a sample may have {needed}",
            cause="It was not trained on later positions."
            if is_loaded
            else "Samples that are too long for the teacher fail.",
            remedy=f"{longer}, or lower --rollout-max-response-len",
            severity="warning",
            evidence={"teacher": name, "context_len": length, "needed": needed + 1},
        )


def _texts(context: PreflightContext, spec: TeacherSpec, folder: str | None) -> Iterator[Diagnosis]:
    tokenizer: Any = context.tokenizer
    remedy = "use a teacher with the policy's tokenizer, or give its own with --opd-teacher-tokenizer"
    if not folder or not (Path(folder) / "tokenizer.json").is_file():
        from furlong.inference.sglang.external import SHOWN_TEXT

        known = None if spec.url is None else asyncio.run(_tokens(spec.url, context.config.cluster.sglang_api_key))
        if known is None:
            logger.info("the vocabulary of the teacher %s is unknown: it must be that of --hf-checkpoint", spec.name)
        elif known != (own := tokenizer.encode(SHOWN_TEXT, add_special_tokens=False)) and known[1:] != own:
            yield diagnosis(
                "OPD01",
                f"the teacher {spec.name} at {spec.url} gives {SHOWN_TEXT!r} the tokens {known[:4]}..., "
                f"--hf-checkpoint {own[:4]}...",
                cause="It has another vocabulary, so its log-probs would be those of other texts.",
                remedy=remedy,
            )
        return
    yield from _rows(context, f"the teacher {spec.name} ({folder})", folder)
    theirs = load_tokenizer(folder)
    if moved := list(moved_tokens("OPD01", f"the teacher {spec.name} ({folder})", tokenizer, theirs, remedy)):
        yield from moved
    else:
        yield from _template(context, spec.name, folder, theirs)


def _rows(context: PreflightContext, name: str, folder: str) -> Iterator[Diagnosis]:
    if not (Path(folder) / "config.json").is_file():
        return
    config, loss = context.config, context.config.opd.opd_loss
    of_teacher, of_policy = read_json(Path(folder) / "config.json"), read_model_config(config)
    rows, needed = ((each.get("text_config") or each).get("vocab_size") for each in (of_teacher, of_policy))
    whose, cause = f"--hf-checkpoint {context.model_dir}", f"--opd-loss {loss} compares tokens that the teacher lacks."
    remedy = "use --opd-loss sampled, or a teacher with at least as many"
    if loss == "sampled" and context.tokenizer is not None:
        needed = max(context.tokenizer.get_vocab().values()) + 1
        whose, cause = f"the tokenizer of {whose}", "The policy can sample tokens that the teacher lacks."
        remedy = "use a teacher with at least as many"
    if rows and needed and rows < needed:
        finding = f"{name} has logits of {rows} tokens, and {whose} of {needed}"
        evidence = {"teacher": rows, "policy": needed}
        yield diagnosis("OPD01", finding, cause=cause, remedy=remedy, evidence=evidence)


def _template(context: PreflightContext, name: str, folder: str, theirs: Any) -> Iterator[Diagnosis]:
    tokenizer: Any = context.tokenizer
    if context.config.data.apply_chat_template and can_render(tokenizer) and can_render(theirs):
        kwargs = context.config.data.apply_chat_template_kwargs
        texts = [render_chat(each, QUESTION, tools=None, kwargs=kwargs) for each in (tokenizer, theirs)]
        if texts[0] != texts[1]:
            yield diagnosis(
                "OPD01",
                f"the teacher {name} ({folder}) was trained on prompts {texts[1][:SHOWN_CHARS]!r}, and reads "
                f"{texts[0][:SHOWN_CHARS]!r}",
                cause="Its chat template differs from that of the policy.",
                remedy="set --chat-template-path to the template of both, or ask it with --opd-teacher-urls and give "
                "--opd-teacher-tokenizer, with which the teacher sees its own",
                severity="warning",
                evidence={"teacher": name},
            )


async def _tokens(url: str, key: str | None) -> list[int] | None:
    from furlong.inference.sglang.external import SHOWN_TEXT
    from furlong.inference.sglang.server import PROBE_S, ServerInfo, SglangServer

    server = SglangServer(url, ServerInfo.read({}), api_key=key)
    try:
        answer = await server.ask("/tokenize", {"prompt": SHOWN_TEXT, "add_special_tokens": False}, timeout_s=PROBE_S)
        return list(answer["tokens"])
    except (EngineError, KeyError, TypeError):
        return None
    finally:
        await server.close()


CHECKS = (teachers,)
