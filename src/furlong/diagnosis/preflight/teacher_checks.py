"""Checks of teachers that are asked during the rollout. One that does not answer is reported when it is connected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.engine_groups import served_models
from furlong.config.teachers import TeacherSpec, teacher_of, teacher_specs
from furlong.core.text import abbreviate
from furlong.data.prompt import can_render, render_chat
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.diagnosis.preflight.weight_checks import moved_tokens
from furlong.errors import ConfigError, DataError, EngineError
from furlong.models.hf_config import context_length
from furlong.models.tokenizer import load_tokenizer

QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
SHOWN_CHARS = 60

logger = logging.getLogger(__name__)


def teachers(context: PreflightContext) -> Iterator[Diagnosis]:
    """OPD01, OPD04: a teacher that reads other texts than the policy, or cannot answer at its temperature."""
    config = context.config
    if context.problems or not (specs := teacher_specs(config)):
        return
    from furlong.inference.sglang.server import ServerInfo, probe  # imports torch

    folders = {model.name: model.path for model in served_models(config)}
    _check_names(context, [spec.name for spec in specs])
    for spec in specs:
        folder, info = spec.folder or folders.get(spec.name), None
        if spec.url is not None:
            try:
                info = ServerInfo.read(probe(spec.url, api_key=None))
                folder = str(probe(spec.url, api_key=None, path="/model_info").get("tokenizer_path") or "")
            except (ConfigError, EngineError) as error:
                logger.info("teacher %s is not compared with the policy: %s", spec.name, error)
                continue
        length = info.context_len if info is not None else context_length(Path(folder)) if folder else None
        yield from _room(context, spec, length)
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


def _check_names(context: PreflightContext, names: list[str]) -> None:
    key = context.config.opd.opd_teacher_key
    for prompt in context.rows.prompts if context.rows is not None else ():
        if teacher_of(given := prompt.metadata.get(key), names) is None:
            raise DataError(
                f"row {prompt.row}: metadata.{key} is {given!r}; the teachers are {abbreviate(names)}: add it to "
                "--opd-teacher-urls, or correct the row"
            )


def _room(context: PreflightContext, spec: TeacherSpec, length: int | None) -> Iterator[Diagnosis]:
    rollout = context.config.rollout
    needed = rollout.rollout_max_context_len
    if needed is None and rollout.rollout_max_prompt_len and rollout.rollout_max_response_len:
        needed = rollout.rollout_max_prompt_len + rollout.rollout_max_response_len
    if length is not None and needed is not None and length < needed + 1:
        yield diagnosis(
            "OPD01",
            f"the teacher {spec.name} has a context of {length} tokens, and a sample may have {needed}",
            cause="Samples that are too long for the teacher fail.",
            remedy=f"serve it with --context-length {needed + 1}, or lower --rollout-max-response-len",
            severity="warning",
            evidence={"teacher": spec.name, "context_len": length, "needed": needed + 1},
        )


def _texts(context: PreflightContext, spec: TeacherSpec, folder: str | None) -> Iterator[Diagnosis]:
    tokenizer: Any = context.tokenizer
    remedy = "use a teacher with the policy's tokenizer, or give its own with --opd-teacher-tokenizer"
    if not folder or not (Path(folder) / "tokenizer.json").is_file():
        from furlong.inference.sglang.external import SHOWN_TEXT

        known = None if spec.url is None else asyncio.run(_tokens(spec.url))
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
    theirs = load_tokenizer(folder)
    if moved := list(moved_tokens("OPD01", f"the teacher {spec.name} ({folder})", tokenizer, theirs, remedy)):
        yield from moved
    elif context.config.data.apply_chat_template and can_render(tokenizer) and can_render(theirs):
        kwargs = context.config.data.apply_chat_template_kwargs
        texts = [render_chat(each, QUESTION, tools=None, kwargs=kwargs) for each in (tokenizer, theirs)]
        if texts[0] != texts[1]:
            yield diagnosis(
                "OPD01",
                f"the teacher {spec.name} ({folder}) was trained on prompts {texts[1][:SHOWN_CHARS]!r}, and reads "
                f"{texts[0][:SHOWN_CHARS]!r}",
                cause="Its chat template differs from that of the policy.",
                remedy="set --chat-template-path to the template of both, or give --opd-teacher-tokenizer, with which "
                "the teacher sees its own",
                severity="warning",
                evidence={"teacher": spec.name},
            )


async def _tokens(url: str) -> list[int] | None:
    from furlong.inference.sglang.external import SHOWN_TEXT
    from furlong.inference.sglang.server import PROBE_S, ServerInfo, SglangServer

    server = SglangServer(url, ServerInfo.read({}))
    try:
        answer = await server.ask("/tokenize", {"prompt": SHOWN_TEXT, "add_special_tokens": False}, timeout_s=PROBE_S)
        return list(answer["tokens"])
    except (EngineError, KeyError, TypeError):
        return None
    finally:
        await server.close()


CHECKS = (teachers,)
