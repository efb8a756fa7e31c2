"""Convert rows of a data file to tokenized prompts, and reject bad rows and rendered prompts with a reason."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, cast

import jinja2
import orjson

from furlong.config.sections import Config
from furlong.config.teachers import MESSAGES
from furlong.core.chat_template import TEMPLATE_ERRORS, TOO_NESTED, apply_template
from furlong.core.user_functions import CONVERSATION, reads_conversations
from furlong.data.row_readers import RawRow
from furlong.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
ROLES = ("user", "system", "assistant")  # that follow the marker of a turn in most templates
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_PROBE = "furlong-probe-7261"

# Why a row is rejected: invalid JSON, wrong columns or types, empty, too long, or messages without a template.
Rejection = Literal["syntax", "form", "empty", "long", "messages", "template"]

# Names of the columns that flags name, in public data sets.
_USUAL_KEYS = {
    "--input-key": ("prompt", "messages", "question", "problem", "instruction", "query", "input"),
    "--label-key": ("label", "answer", "solution", "ground_truth", "target", "gold", "output"),
}
PIECE_ROWS = 64
SHOWN_ROWS = 5
_EXACT_FLOAT = 2.0**63


@dataclass(frozen=True)
class PromptFormat:
    """The columns that make a prompt, and how it is tokenized. Fields are named after the flags.

    With `apply_chat_template` a string prompt is one user message. Without it, messages are rejected unless
    `keep_messages`: then they stay messages without tokens, for a generate function that renders them itself. With
    `demonstrates`, so do conversations that end with an answer, which SFT renders. With `copies_messages`, what the
    template renders is in the metadata as well, for teachers with another one; with `copies_conversations`, messages of
    the data are, for rewards in TRL's form.
    """

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = "metadata"
    tool_key: str | None = "tools"
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    keep_messages: bool = False
    copies_messages: bool = False
    copies_conversations: bool = False
    demonstrates: bool = False
    max_prompt_len: int | None = None
    limit_flag: str = "--rollout-max-prompt-len"  # sets max_prompt_len

    @staticmethod
    def of(config: Config, *, evaluation: bool = False) -> PromptFormat:
        """Read the format of --prompt-data, or of an evaluation set with this configuration."""
        data = config.data
        is_demonstration = config.algo.loss_type == "sft_loss" and not evaluation
        limit, context_len = config.rollout.rollout_max_prompt_len, config.rollout.rollout_max_context_len
        if context_len is not None and not is_demonstration:  # at least one token is generated
            limit = context_len - 1 if limit is None else min(limit, context_len - 1)
        kind = "prompt" if limit == config.rollout.rollout_max_prompt_len else "context"
        return PromptFormat(
            input_key=data.input_key,
            label_key=data.label_key,
            metadata_key=data.metadata_key,
            tool_key=data.tool_key,
            apply_chat_template=data.apply_chat_template,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
            copies_messages=config.opd.opd_teacher_tokenizer is not None and data.apply_chat_template,
            copies_conversations=data.apply_chat_template and reads_conversations(config.reward.custom_rm_path),
            keep_messages=config.rollout.custom_generate_function_path is not None or is_demonstration,
            demonstrates=is_demonstration,
            max_prompt_len=limit,
            limit_flag=f"--{'eval' if evaluation else 'rollout'}-max-{kind}-len",
        )

    @property
    def columns(self) -> list[str]:
        """The columns to read, the prompt first."""
        return [self.input_key, *(k for k in (self.label_key, self.metadata_key, self.tool_key) if k)]


@dataclass(slots=True)
class Prompt:
    """A row that can be issued. `text` is the text of `tokens`, or unrendered messages."""

    row: int
    text: str | list[dict[str, Any]]
    tokens: list[int]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    tools: list[dict[str, Any]] | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be issued. `num_tokens` is set if its length is the only reason."""

    row: int
    where: str
    reason: str
    num_tokens: int | None = None
    kind: Rejection = "form"


class _BadRowError(Exception):
    """Raised for a row that is not a valid prompt; converted to `RejectedRow`."""

    def __init__(self, reason: str, kind: Rejection = "form") -> None:
        super().__init__(reason)
        self.kind: Rejection = kind


class PromptRenderer:
    """Renders and tokenizes raw rows in `num_workers` threads; results and order do not depend on the number.

    Threads suffice because fast tokenizers release the GIL. Without a tokenizer, prompts have no tokens.
    """

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat, *, num_workers: int = 0) -> None:
        if num_workers < 0:
            raise ConfigError(f"--num-data-workers is {num_workers}; it must be at least 0 (no workers)")
        if prompt_format.apply_chat_template:
            require_template(tokenizer)
        if tokenizer is None and prompt_format.max_prompt_len is not None:
            raise ConfigError("--rollout-max-prompt-len needs a tokenizer; provide one, or remove the flag")
        self.format = prompt_format
        self._tokenizer: Any = tokenizer
        self._pool = ThreadPoolExecutor(num_workers, "furlong-data") if num_workers else None
        if tokenizer is not None:
            # The first call sets the backend's padding and truncation; later calls only read the tokenizer.
            self._encode(["a"])

    def render(self, rows: Sequence[RawRow]) -> list[Prompt | RejectedRow]:
        """Return one result per row, in order. Bad rows do not raise."""
        pieces = [rows[i : i + PIECE_ROWS] for i in range(0, len(rows), PIECE_ROWS)]
        done = map(self._piece, pieces) if self._pool is None else self._pool.map(self._piece, pieces)
        return [result for piece in done for result in piece]

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.shutdown()

    def _piece(self, rows: Sequence[RawRow]) -> list[Prompt | RejectedRow]:
        results: list[Prompt | RejectedRow] = []
        for raw in rows:
            try:
                results.append(self._untokenized(raw))
            except _BadRowError as error:
                results.append(RejectedRow(raw.row, raw.where, str(error), kind=error.kind))
        if self._tokenizer is None:
            return results
        slots = [i for i, r in enumerate(results) if isinstance(r, Prompt) and isinstance(r.text, str)]
        encoded = self._encode([cast(str, cast(Prompt, results[i]).text) for i in slots]) if slots else []
        limit = self.format.max_prompt_len
        for i, tokens in zip(slots, encoded, strict=True):
            prompt, where = cast(Prompt, results[i]), rows[i].where
            prompt.tokens = tokens
            if not tokens:
                results[i] = RejectedRow(prompt.row, where, "the prompt has no tokens", kind="empty")
            elif limit is not None and len(tokens) > limit:
                results[i] = RejectedRow(prompt.row, where, f"{len(tokens)} tokens, limit {limit}", len(tokens), "long")
        return results

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _untokenized(self, raw: RawRow) -> Prompt:
        fmt = self.format
        values = raw.raw if isinstance(raw.raw, dict) else _parsed(raw.raw, raw.after.line == 1)
        side = "--eval-" if fmt.limit_flag.startswith("--eval") else "--"
        value = _required(values, fmt.input_key, f"{side}input-key")
        label = None
        if fmt.label_key:
            label = _required(values, fmt.label_key, f"{side}label-key")
            if label is None or label == "":
                raise _BadRowError(f"the label {fmt.label_key!r} is empty", "empty")
        metadata = _decoded(values, fmt.metadata_key, dict, "an object", "--metadata-key") or {}
        tools = _decoded(values, fmt.tool_key, list, "a list of tools", "--tool-key") or None
        if fmt.copies_messages:
            metadata = {**metadata, MESSAGES: _messages(value)}
        if fmt.copies_conversations and not isinstance(value, str):
            metadata = {**metadata, CONVERSATION: value}
        text = self._text(value, tools)
        return Prompt(raw.row, text, [], label, metadata, tools, fmt.apply_chat_template_kwargs)

    def _text(self, value: Any, tools: list[dict[str, Any]] | None) -> str | list[dict[str, Any]]:
        fmt = self.format
        if isinstance(value, str):
            if not value.strip():
                raise _BadRowError(f"the prompt {fmt.input_key!r} is empty", "empty")
            if not fmt.apply_chat_template:
                return value
            messages = _messages(value)
        elif value is None or value == []:
            raise _BadRowError(f"the prompt {fmt.input_key!r} is empty", "empty")
        elif problem := message_problem(value):
            raise _BadRowError(f"the prompt {fmt.input_key!r} is not text or chat messages: {problem}")
        else:
            messages = cast("list[dict[str, Any]]", value)
            if not has_text(messages):
                raise _BadRowError(f"all messages of the prompt {fmt.input_key!r} are empty", "empty")
            if fmt.apply_chat_template or fmt.demonstrates:
                self._check_roles(messages)
            if fmt.demonstrates and messages[-1]["role"] == "assistant":
                return messages
        if not fmt.apply_chat_template:
            if fmt.keep_messages:
                return messages
            raise _BadRowError(f"the prompt {fmt.input_key!r} is chat messages; add --apply-chat-template", "messages")
        try:
            return render_chat(self._tokenizer, messages, tools=tools, kwargs=fmt.apply_chat_template_kwargs)
        except TEMPLATE_ERRORS as error:
            raise _BadRowError(
                f"the chat template rejects it: {type(error).__name__}: {error}; change the messages to roles and "
                "fields that the template accepts, or use another template with --chat-template-path",
                "template",
            ) from error

    def _check_roles(self, messages: Messages) -> None:
        """Raise _BadRowError for a role that is another one misspelled; templates such as ChatML render any word."""
        for role in {message["role"] for message in messages} - {*ROLES, "tool", "developer", "function"}:
            meant = SHAREGPT_ROLES.get(role.lower()) or next(iter(get_close_matches(role.lower(), ROLES, 1, 0.8)), None)
            if meant is not None and role not in str(getattr(self._tokenizer, "chat_template", "")):
                raise _BadRowError(f"the role {role!r} is unknown to the chat template; write {meant!r}", "template")


def _messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class RowFilter:
    """Rejects or counts bad rows, and logs once how many rows were left out and why."""

    def __init__(
        self,
        name: str,
        *,
        max_prompt_len: int | None,
        skip_bad_rows: bool,
        limit_flag: str = "--rollout-max-prompt-len",
    ) -> None:
        self.name = name
        self.max_prompt_len, self.limit_flag = max_prompt_len, limit_flag
        self.skip_bad_rows = skip_bad_rows
        self.num_kept = self.num_long = self.num_bad = 0
        self.first_bad: list[str] = []
        self._is_logged = False

    def admits(self, result: Prompt | RejectedRow) -> bool:
        """Return whether the row is a prompt to issue. Raises DataError for a bad row unless bad rows are skipped."""
        if isinstance(result, Prompt):
            self.num_kept += 1
            return True
        if result.num_tokens is not None:
            self.num_long += 1
            return False
        message = f"{result.where}: {result.reason}"
        if not self.skip_bad_rows:
            raise DataError(f"{message}; correct the row, or skip such rows with --skip-bad-rows")
        self.num_bad += 1
        if len(self.first_bad) < SHOWN_ROWS:
            self.first_bad.append(message)
        return False

    def log_summary(self) -> None:
        """Log what was left out, on the first call only."""
        if self._is_logged:
            return
        self._is_logged = True
        total = self.num_kept + self.num_long + self.num_bad
        if self.num_bad:
            message = "%s: skipped %d of %d rows (bad rows); the first: %s"
            logger.warning(message, self.name, self.num_bad, total, self.first_bad)
        if self.num_long:
            limit = self.max_prompt_len
            flag = self.limit_flag
            message = "%s: dropped %d of %d prompts longer than %s tokens (%s)"
            logger.warning(message, self.name, self.num_long, total, limit, flag)

    def require_some(self) -> None:
        """Raise DataError if nothing was kept."""
        if not self.num_kept:
            counts = f"{self.num_bad} bad rows, {self.num_long} prompts over {self.max_prompt_len} tokens"
            hint = (
                self.first_bad[0]
                if self.first_bad
                else f"check the file, its slice, and {self.limit_flag}, or shorten the prompts"
            )
            raise DataError(f"{self.name} has no usable prompts ({counts}); {hint}")


OTHER_FILES = {  # by how they start
    b"PAR1": "it is a Parquet file: name it .parquet",
    b"\x1f\x8b": "it is compressed: unpack it with gunzip",
    b"PK\x03\x04": "it is a zip archive or a spreadsheet: unpack it, or export JSON Lines",
    b"\xff\xfe": "it is UTF-16: convert it with `iconv -f utf-16 -t utf-8`",
}


def _parsed(line: bytes, is_first: bool) -> dict[str, Any]:
    text = line.removeprefix(b"\xef\xbb\xbf") if is_first else line
    try:
        values = orjson.loads(text)
        if _has_huge_number(values):  # orjson converts integers beyond 64 bits to floats
            values = json.loads(text)
    except (ValueError, RecursionError) as error:
        try:
            shown = text.decode()[:60].strip()
        except UnicodeDecodeError as broken:
            fix = next(
                (fix for mark, fix in OTHER_FILES.items() if line.startswith(mark)),
                "save the file as UTF-8 (with iconv)",
            )
            raise _BadRowError(
                f"byte {broken.start + 1} of the line is not UTF-8: {line[:40]!r}; {fix}", "syntax"
            ) from error
        if is_first and shown in ("[", "{"):
            raise _BadRowError(
                f"one JSON document over many lines, starting with {shown!r}; write one object per line "
                f"(with `jq -c '{'.[]' if shown == '[' else '.'}'`)",
                "syntax",
            ) from error
        fix = "; write rows with json.dumps, in double quotes" if shown.startswith("{'") else ""
        fix = fix or ("; remove the comma at the end of the line" if text.rstrip().endswith(b",") else "")
        raise _BadRowError(f"not JSON ({error}): {shown!r}{fix}", "syntax") from error
    if not isinstance(values, dict):
        raise _BadRowError(
            f"a {type(values).__name__}, not an object of columns; write one object per line (with `jq -c '.[]'`)",
            "syntax",
        )
    return cast("dict[str, Any]", values)


def _has_huge_number(value: Any) -> bool:
    if isinstance(value, float):
        return abs(value) >= _EXACT_FLOAT
    if isinstance(value, dict):
        return any(_has_huge_number(item) for item in cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        return any(_has_huge_number(item) for item in cast("list[Any]", value))
    return False


def _required(values: dict[str, Any], key: str, flag: str) -> Any:
    if key in values:
        return values[key]
    head, *keys = key.split(".")
    inner: Any = values.get(head)
    while keys and isinstance(inner, dict) and keys[0] in inner:
        inner = cast("dict[str, Any]", inner)[keys.pop(0)]
    if head in values and not keys:
        return inner
    close = get_close_matches(key, list(values), n=1, cutoff=0.5)
    close = close or [name for name in _USUAL_KEYS[flag.replace("--eval-", "--")] if name in values]
    closest = f"the closest is {close[0]!r} ({flag} {close[0]})" if close else f"set the right one with {flag}"
    raise _BadRowError(f"no key {key!r}; the row has {sorted(values)}; {closest}")


def _decoded(values: dict[str, Any], key: str | None, kind: type, what: str, flag: str) -> Any:
    """Return the value of an optional column, decoded if it is JSON in a string, as in flat Parquet columns."""
    value = values.get(key) if key else None
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _BadRowError(f"{key!r} ({flag}) is a string that is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise _BadRowError(f"{key!r} ({flag}) is {type(value).__name__}, not {what}")
    return value


def message_problem(value: Any) -> str | None:
    """Return why `value` is not a conversation, or None if it is one.

    A message is an object with a non-empty string `role` and a `content` that is a string or a list of typed parts;
    a message with `tool_calls` needs no content.
    """
    if not isinstance(value, list) or not value:
        return f"a conversation is a non-empty list of messages, not {_shown(value)}"
    if all(type(entry) is int for entry in cast("list[Any]", value)):
        return (
            "it is a list of numbers, such as token ids; give the text (`furlong data tokenize` makes files of tokens)"
        )
    for i, message in enumerate(cast("list[Any]", value)):
        if not isinstance(message, dict):
            return f"message {i} is {_shown(message)}, not an object with role and content"
        fields = cast("dict[str, Any]", message)
        role, content = fields.get("role"), fields.get("content")
        if {"from", "value"} <= fields.keys() and role is None:
            return (
                "its messages are in ShareGPT's form; rename `from` to role (human: user, gpt: assistant), and `value` "
                "to content"
            )
        if not isinstance(role, str) or not role:
            return f"message {i} has role {_shown(role)} and keys {sorted(fields)}; role must be a non-empty string"
        if isinstance(content, str) or (content is None and fields.get("tool_calls")):
            continue
        if isinstance(content, list) and content and all(_is_part(part) for part in cast("list[Any]", content)):
            kinds = [part["type"] for part in cast("list[Any]", content)]
            if media := [kind for kind in kinds if any(word in kind for word in ("image", "audio", "video"))]:
                return f"message {i} ({role}) has a part of type {media[0]}; models are text-only: remove such rows"
            continue
        return f"message {i} ({role}) has content {_shown(content)}; content must be a string or a list of typed parts"
    return None


def has_text(messages: Messages) -> bool:
    """Return whether any message has content: text other than white space, a part, or a tool call."""
    return any(
        m.get("tool_calls") or (m["content"].strip() if isinstance(m["content"], str) else m["content"])
        for m in messages
    )


def render_chat(
    tokenizer: Any, messages: Messages, *, tools: Sequence[dict[str, Any]] | None, kwargs: Mapping[str, Any]
) -> str:
    """Render messages with the tokenizer's chat template, up to the start of the assistant's turn.

    `kwargs` are passed to the template and override `add_generation_prompt=True`.
    """
    options = {"add_generation_prompt": True, **kwargs}
    return apply_template(tokenizer, messages, tools=tools or None, tokenize=False, **options)


def double_template_problem(prompts: Sequence[str | Messages], tokenizer: Any) -> str | None:
    """Return a message if prompts are already rendered with a chat template, else None.

    Either the text contains one of the tokenizer's special tokens, or it ends with the text that the template writes
    between a user's turn and the assistant's.
    """
    rendered = rendered_prompts(prompts, tokenizer)
    if not rendered:
        return None
    number, (marker, text) = next(iter(rendered.items()))
    is_all = len(rendered) == len(prompts)
    return (
        f"{len(rendered)} of {len(prompts)} prompts already contain {marker!r}, which the chat template adds: "
        f"--apply-chat-template would render {'them' if len(rendered) > 1 else 'it'} twice (the first is prompt "
        f"{number}, which starts with {text[:80]!r}); "
        + ("remove --apply-chat-template, or use" if is_all else "store all prompts in one form:")
        + " plain text or messages as prompts"
    )


def rendered_prompts(prompts: Sequence[str | Messages], tokenizer: Any) -> dict[int, tuple[str, str]]:
    """Return the prompts that contain what the tokenizer's chat template adds: number -> marker and text."""
    specials = sorted(_special_tokens(tokenizer), key=len, reverse=True)
    turn_end = _turn_end(tokenizer)
    rendered: dict[int, tuple[str, str]] = {}
    for number, prompt in enumerate(prompts):
        for text in _texts(prompt):
            marker = next((token for token in specials if token in text and _is_in_place(token, text)), None)
            if marker is None and turn_end and text.rstrip().endswith(turn_end):
                marker = turn_end
            if marker is not None:
                rendered[number] = marker, text
                break
    return rendered


def _is_in_place(token: str, text: str) -> bool:
    """Return whether a special token is where a template puts it, and not quoted within a sentence."""
    stripped = text.strip()
    return stripped.startswith(token) or stripped.endswith(token) or any(token + role in text for role in ROLES)


def require_template(tokenizer: Any) -> None:
    """Raise DataError if the tokenizer cannot apply a chat template: it has none, or it is not valid Jinja."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"the tokenizer {name} has no chat template (a base model?); remove --apply-chat-template, or set "
            "--chat-template-path"
        )
    if problem := syntax_problem(tokenizer):
        raise DataError(f"the chat template of {name} {problem}; correct it, or set --chat-template-path")


def can_render(tokenizer: Any) -> bool:
    """Return whether `require_template` passes."""
    return getattr(tokenizer, "chat_template", None) is not None and syntax_problem(tokenizer) is None


def syntax_problem(tokenizer: Any) -> str | None:
    """Return where the tokenizer's chat template is not valid Jinja, or None."""
    try:
        render_chat(tokenizer, [{"role": "user", "content": _PROBE}], tools=None, kwargs={})
    except jinja2.TemplateSyntaxError as error:
        return f"cannot be parsed: line {error.lineno}: {error.message}"
    except TOO_NESTED:
        return "cannot be compiled: it is nested too deeply"
    except TEMPLATE_ERRORS:  # valid Jinja that does not support the probe
        return None
    return None


def _special_tokens(tokenizer: Any) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", []))
    return {token for token in tokens if len(token) > 2}


def _turn_end(tokenizer: Any) -> str:
    """Return what the template writes after a user's turn; "" if nothing, or if it cannot render the probe."""
    if getattr(tokenizer, "chat_template", None) is None:
        return ""
    try:
        rendered = render_chat(tokenizer, [{"role": "user", "content": _PROBE}], tools=None, kwargs={})
    except TEMPLATE_ERRORS:  # e.g. it requires a system message; only special tokens are checked then
        return ""
    mark = rendered.rpartition(_PROBE)[2].strip()
    return mark if len(mark) > 4 else ""


def _texts(prompt: str | Messages) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    return [m["content"] for m in prompt if isinstance(m.get("content"), str)]


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("type"), str)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
