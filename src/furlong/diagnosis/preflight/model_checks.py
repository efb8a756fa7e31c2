"""CKPT07, SYNC, TPL and STOP rows: the model folder and its chat template."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.chat_template import TEMPLATE_ERRORS
from furlong.core.model_config import read_json
from furlong.data.prompt import message_problem, syntax_problem
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.errors import ConfigError
from furlong.models.hf_folder import COMPLETE, folder_problem, template_file
from furlong.models.tokenizer import load_tokenizer
from furlong.sglang_layout.layout_facts import HASHED, KEEPS_ROUTER, OWN_HEAD
from furlong.tools.template_test import (
    ANSWER,
    QUESTION,
    Conversation,
    ConversationCheck,
    Template,
    foreign_marker,
    generation_ends,
    marks_of,
    prompt_findings,
    rewriting_findings,
    stop_findings,
)

COMPLETE_MODEL = "use a complete Hugging Face model folder with --hf-checkpoint"
SHOWN_CONVERSATIONS = 16
ROUTERS = r"mlp\.gate\.weight"
ESCAPED = re.compile(r"\\[nrt]")


def model_folder(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT07: --hf-checkpoint lacks a config.json of a known family, weights, or a readable tokenizer."""
    if context.model_dir is None:
        return  # reported with the flags
    yield from folder_problems(context.model_dir, tokenizer=context.tokenizer)


def folder_problems(folder: Path, *, tokenizer: Any = None, needs_tokenizer: bool = True) -> Iterator[Diagnosis]:
    """CKPT07: what keeps a run from loading a model folder, apart from its weights; at most one finding.

    tokenizer: that of the folder, if it was read.
    """
    if problem := folder_problem(folder, weights=True, tokenizer=needs_tokenizer):
        finding, remedy = problem
        if remedy == COMPLETE:
            remedy = COMPLETE_MODEL
        yield diagnosis("CKPT07", finding, remedy=remedy, evidence={"folder": str(folder)})
        return
    try:
        read_json(folder / "config.json")
        read_json(folder / "generation_config.json")
        if tokenizer is None and needs_tokenizer:
            load_tokenizer(folder)  # raises its problem
    except ConfigError as error:
        finding, _, remedy = str(error).rpartition("; ")
        if not finding:
            finding, remedy = remedy, COMPLETE_MODEL
        yield diagnosis("CKPT07", finding, cause="", remedy=remedy, evidence={"folder": str(folder)})
        return


def no_template(context: PreflightContext) -> Iterator[Diagnosis]:
    """TPL01: --apply-chat-template, or SFT on messages, without a template, or with one that is not valid Jinja."""
    data, tokenizer, flag = context.config.data, context.tokenizer, "--apply-chat-template"
    if tokenizer is None or context.model_dir is None:
        return
    if not data.apply_chat_template:
        if context.config.algo.loss_type != "sft_loss" or context.rows is None:
            return
        if not any(isinstance(prompt.text, list) for prompt in context.rows.prompts):
            return
        flag = ""
    if not tokenizer.chat_template:
        yield diagnosis(
            "TPL01",
            f"{flag or 'SFT on messages'}: the tokenizer of {context.model_dir} has no chat template",
            cause="It is the tokenizer of a base model.",
            remedy=f"{flag and f'remove {flag}, or '}set a template with --chat-template-path "
            "(`furlong template list`)",
        )
    elif problem := syntax_problem(tokenizer):
        assert context.model_dir is not None  # it has the tokenizer
        path = data.chat_template_path
        place = f"--chat-template-path {path}" if path else f"the chat template in {template_file(context.model_dir)}"
        yield diagnosis(
            "TPL01",
            f"{place} {problem}",
            cause="It is not valid Jinja, so no prompt can be rendered.",
            remedy="correct that line, or use another template with --chat-template-path (`furlong template list`)",
        )


def templated_twice(context: PreflightContext) -> Iterator[Diagnosis]:
    """TPL01: prompts that already contain what the template adds."""
    if _template(context) is None:
        return
    prompts = context.prompts_as_written
    yield from prompt_findings(prompts, context.tokenizer, name=f"--prompt-data {context.config.data.prompt_data}")


def of_another_family(context: PreflightContext) -> Iterator[Diagnosis]:
    """TPL01: prompts rendered with another model's chat template, or messages stored as JSON text."""
    if context.tokenizer is None or not context.generates:
        return
    prompts, name = context.prompts_as_written, f"--prompt-data {context.config.data.prompt_data}"
    marker = foreign_marker(prompts, context.tokenizer)
    if marker is not None:
        mark, count = marker
        yield diagnosis(
            "TPL01",
            f"{name}: {count} of {len(prompts)} prompts contain {mark!r}, which is not a token of {context.model_dir} "
            "and not in its chat template",
            cause="They were rendered with another model's chat template; this model reads its markers as text.",
            remedy="use plain questions or messages with --apply-chat-template, or prompts rendered with this model's "
            "template",
            severity="warning",
            evidence={"mark": mark, "num_prompts": count},
        )
    key = context.config.data.input_key
    quoted = [prompt for prompt in prompts if isinstance(prompt, str) and _is_quoted_conversation(prompt)]
    if quoted and len(quoted) * 2 >= len(prompts):
        yield diagnosis(
            "TPL01",
            f"{name}: {len(quoted)} of {len(prompts)} prompts are messages stored as text (the first starts "
            f"{quoted[0][:60]!r}); the model would read that text itself",
            cause="The column was exported as text, by json.dumps or str.",
            remedy=f"convert them to lists with `jq -c '.{key} |= fromjson'` (text of Python's str: "
            "`ast.literal_eval`), and add --apply-chat-template",
            severity="warning",
            evidence={"num_prompts": len(quoted)},
        )


def _is_quoted_conversation(text: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            return message_problem(read(text)) is None
        except (ValueError, SyntaxError):
            continue
    return False


def lost_text(context: PreflightContext) -> Iterator[Diagnosis]:
    """TPL01: messages whose text is not in the rendered prompt, or different messages with one rendering."""
    template = _template(context)
    if template is None or context.tokenizer is None:
        return
    lost: list[tuple[int, str]] = []
    renderings: dict[str, str] = {}
    same = 0
    for number, prompt in enumerate(context.prompts_as_written):
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        try:
            rendered = template.render(messages, prompt=True)
        except TEMPLATE_ERRORS:  # data.rows reports rows that cannot be rendered
            continue
        same += renderings.setdefault(rendered, repr(messages)) != repr(messages)
        for message in messages:
            content = message.get("content")
            is_kept = message["role"] != "assistant"  # answers may lose their thinking
            if is_kept and isinstance(content, str) and content.strip() not in rendered:
                lost.append((number, message["role"]))
    if lost or same:
        rows = f"the text of {len(lost)} messages (row {lost[0][0]}: role {lost[0][1]!r})" if lost else "what differs"
        yield diagnosis(
            "TPL01",
            f"{context.config.data.prompt_data}: the chat template of {context.model_dir} leaves out {rows}"
            + (f"; {same} prompts are rendered like another one" if same else ""),
            cause="The template has no branch for this role or form of messages, or changes their text.",
            remedy="use roles and forms that the template renders (`furlong template check`), or another template with "
            "--chat-template-path",
            severity="error" if same else "warning",
            evidence={"num_lost": len(lost), "num_same": same},
        )


def rewritten_history(context: PreflightContext) -> Iterator[Diagnosis]:
    """TPL02: conversations in the data whose earlier turns the template renders differently later on."""
    template, config = _template(context), context.config
    has_several_turns = config.algo.loss_type == "sft_loss" or config.rollout.custom_generate_function_path is not None
    if template is None or not has_several_turns:
        return
    checks: list[ConversationCheck] = []
    for number, prompt in enumerate(context.prompts_as_written[:SHOWN_CONVERSATIONS]):
        if not isinstance(prompt, list):
            continue
        roles = [message["role"] for message in prompt]
        if "assistant" not in roles or "user" not in roles:
            continue
        name = f"row {number} of {context.config.data.prompt_data}"
        try:
            checks.append(ConversationCheck(name, "as given", template.first_rewriting(Conversation(name, prompt))))
        except TEMPLATE_ERRORS as error:  # data.rows reports rows that cannot be rendered
            checks.append(ConversationCheck(name, "as given", refused=f"{type(error).__name__}: {error}"))
    if any(check.rewriting is not None for check in checks):
        for finding in rewriting_findings(checks, name=f"the chat template of {context.model_dir}", suggested=None):
            yield dataclasses.replace(finding, severity="warning")  # a custom function may keep the original tokens


def end_of_turn(context: PreflightContext) -> Iterator[Diagnosis]:
    """STOP01: the token that ends a turn in the template does not end generation; without template, none does."""
    rollout = context.config.rollout
    folder, tokenizer, template = context.model_dir, context.tokenizer, _template(context)
    if folder is None or tokenizer is None or not context.generates:
        return
    stop_ids, stop = rollout.rollout_stop_token_ids or (), rollout.rollout_stop or ()
    if template is None and tokenizer.chat_template:
        prompts = [text for text in context.prompts_as_written if isinstance(text, str)]
        rendered = sum(any(mark in text for mark in marks_of(tokenizer)) for text in prompts)
        if prompts and rendered * 2 >= len(prompts):  # rendered beforehand with this template
            template = Template(tokenizer)
    if template is not None:
        try:
            yield from stop_findings(tokenizer, folder, template, stop_token_ids=stop_ids, stop=stop)
        except TEMPLATE_ERRORS:  # the template does not accept the probe conversation
            return
        return
    if not (generation_ends(folder, tokenizer) or stop_ids or stop):
        yield diagnosis(
            "STOP01",
            f"{folder}: neither generation_config.json, config.json nor the tokenizer has an end-of-text token",
            cause="Every response would run to its length limit.",
            remedy="set --rollout-stop-token-ids N, or --rollout-stop TEXT",
            evidence={"folder": str(folder)},
        )


def escaped_stops(context: PreflightContext) -> Iterator[Diagnosis]:
    """STOP01: a --rollout-stop with a backslash and a letter, for which the shell has another notation."""
    for text in context.config.rollout.rollout_stop or ():
        if meant := ESCAPED.findall(text):
            yield diagnosis(
                "STOP01",
                f"--rollout-stop {text!r} has a backslash and {meant[0][1]!r}: two characters, which end no line",
                cause="A shell passes '\\n' as two characters.",
                remedy="write --rollout-stop $'\\n' in bash, or a list of quoted texts in a YAML file",
                severity="warning",
            )


def no_start_of_turn(context: PreflightContext) -> Iterator[Diagnosis]:
    """TPL01: a template with a header before answers, which prompts for the model lack."""
    template = _template(context)
    if template is None or not context.generates:
        return
    user, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    try:
        prompt, plain = template.render([user], prompt=True), template.render([user])
        whole = template.render([user, answer])
    except TEMPLATE_ERRORS:  # the template does not accept the probe conversation
        return
    header = whole[len(prompt) :].partition(ANSWER)[0].strip()
    if prompt == plain and whole.startswith(prompt) and ANSWER in whole and header:
        yield diagnosis(
            "TPL01",
            f"the chat template writes {header!r} before an answer, but prompts end without it",
            cause="It has no branch for `add_generation_prompt`, so the model continues after the user's turn.",
            remedy="add {% if add_generation_prompt %} with that text to the template, or use another one with "
            "--chat-template-path",
            severity="warning",
            evidence={"header": header},
        )


def stop_ids(context: PreflightContext) -> Iterator[Diagnosis]:
    """STOP01: --rollout-stop-token-ids outside of the vocabulary."""
    if context.model is None or (size := context.model.text_config.get("vocab_size")) is None:
        return
    if unknown := [number for number in context.config.rollout.rollout_stop_token_ids or () if number >= size]:
        yield diagnosis(
            "STOP01",
            f"--rollout-stop-token-ids {' '.join(map(str, unknown))}: {context.model_dir} has tokens 0 to {size - 1}",
            cause="The ids belong to another tokenizer; no response would end there.",
            remedy="use ids of this tokenizer's vocabulary, or texts with --rollout-stop",
            evidence={"ids": unknown, "vocab_size": size},
        )


def _template(context: PreflightContext) -> Template | None:
    data = context.config.data
    if not data.apply_chat_template or context.tokenizer is None or not context.tokenizer.chat_template:
        return None
    kwargs: Mapping[str, Any] = data.apply_chat_template_kwargs
    return Template(context.tokenizer, kwargs=kwargs)


def kept_routers(context: PreflightContext) -> Iterator[Diagnosis]:
    """SYNC03: a trained router whose outdated copy SGLang keeps using."""
    config, model = context.config, context.model
    if config.cluster.engine != "sglang" or model is None or config.debug.debug_rollout_only:
        return
    family = model.text_config.get("model_type")
    if family not in KEEPS_ROUTER:
        return
    only, frozen = config.train.only_train_params_name_list, config.train.freeze_params_name_list or ()
    trained = [
        name
        for name in model.weight_map
        if re.search(ROUTERS, name)
        and (only is None or any(re.search(pattern, name) for pattern in only))
        and not any(re.search(pattern, name) for pattern in frozen)
    ]
    if trained:
        yield diagnosis(
            "SYNC03",
            f"{len(trained)} routers of this {family} model are trained ({trained[0]} is the first), but {HASHED[0]} "
            "keeps using the weights that they had in its first forward pass",
            evidence={"model_type": family, "routers": len(trained)},
        )


def own_head(context: PreflightContext) -> Iterator[Diagnosis]:
    """SYNC04: a tied output layer in a family that SGLang implements with a separate one."""
    config, model = context.config, context.model
    if config.cluster.engine != "sglang" or model is None:
        return
    family, is_tied = model.text_config.get("model_type"), model.text_config.get("tie_word_embeddings", False)
    if family in OWN_HEAD and is_tied:
        yield diagnosis(
            "SYNC04",
            f"the output layer of this {family} model is tied to its embedding (tie_word_embeddings in "
            f"{model.folder}/config.json), but {HASHED[0]} has a separate one, which gets no weights",
            evidence={"model_type": family, "tie_word_embeddings": is_tied},
        )


CHECKS = (
    model_folder,
    no_template,
    templated_twice,
    of_another_family,
    lost_text,
    rewritten_history,
    end_of_turn,
    escaped_stops,
    no_start_of_turn,
    stop_ids,
    kept_routers,
    own_head,
)
