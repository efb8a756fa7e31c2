"""Chat messages: validation, rendering with a chat template, and detection of prompts that are already rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2

from furlong.core.chat_template import TEMPLATE_ERRORS, TOO_NESTED, apply_template
from furlong.errors import DataError

Messages = list[dict[str, Any]]

ROLES = ("user", "system", "assistant")  # that follow the marker of a turn in most templates
_PROBE = "furlong-probe-7261"


def message_problem(value: Any) -> str | None:
    """Return why `value` is not a conversation, or None if it is one.

    A message is an object with a non-empty string `role` and a `content` that is a string or a list of typed parts;
    a message with `tool_calls` needs no content.
    """
    if not isinstance(value, list) or not value:
        return f"a conversation is a non-empty list of messages, not {_shown(value)}"
    for i, message in enumerate(cast("list[Any]", value)):
        if not isinstance(message, dict):
            return f"message {i} is {_shown(message)}, not an object with role and content"
        fields = cast("dict[str, Any]", message)
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not role:
            return f"message {i} has role {_shown(role)} and keys {sorted(fields)}; role must be a non-empty string"
        if isinstance(content, str) or (content is None and fields.get("tool_calls")):
            continue
        if isinstance(content, list) and content and all(_is_part(part) for part in cast("list[Any]", content)):
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
