"""Chat messages: what counts as a conversation, how a template renders it, and the sign of one rendered twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2

from furlong.errors import DataError

Messages = list[dict[str, Any]]

# What a template may raise on a conversation that it was not written for; all else is a bug and propagates.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)

_PROBE = "furlong-probe-7261"


def message_problem(value: Any) -> str | None:
    """Say why `value` is no conversation, or None if it is one.

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
    """Whether any message says something: text that is not only white space, a part, or a tool call."""
    return any(
        m.get("tool_calls") or (m["content"].strip() if isinstance(m["content"], str) else m["content"])
        for m in messages
    )


def render_chat(
    tokenizer: Any, messages: Messages, *, tools: Sequence[dict[str, Any]] | None, kwargs: Mapping[str, Any]
) -> str:
    """Render messages with the tokenizer's chat template, ending where the assistant is to speak.

    `kwargs` go to the template and override `add_generation_prompt=True`.
    """
    options = {"add_generation_prompt": True, **kwargs}
    return tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options)


def double_template_problem(prompts: Sequence[str | Messages], tokenizer: Any) -> str | None:
    """Say whether prompts already hold a rendered chat template, or None. For use where a template will be applied.

    Two signs: one of the tokenizer's special tokens in the text, or the text that the template puts between a user's
    words and the assistant's at the end of a prompt. Prompts without a sign say nothing.
    """
    specials = sorted(_special_tokens(tokenizer), key=len, reverse=True)
    turn_end = _turn_end(tokenizer)
    for number, prompt in enumerate(prompts):
        for text in _texts(prompt):
            found = next((token for token in specials if token in text), None)
            if found is None and turn_end and text.rstrip().endswith(turn_end):
                found = turn_end
            if found is not None:
                return (
                    f"prompt {number} already holds {found!r}, which the chat template adds: with "
                    f"--apply-chat-template it would be templated twice (it starts {text[:80]!r}); "
                    "drop --apply-chat-template, or give the plain text or messages"
                )
    return None


def require_template(tokenizer: Any) -> None:
    """Raise DataError if the tokenizer cannot apply a chat template: it has none, or one that is no Jinja."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"the tokenizer {name} has no chat template (a base model?); drop --apply-chat-template, or give one with "
            "--chat-template-path"
        )
    if problem := syntax_problem(tokenizer):
        raise DataError(f"the chat template of {name} {problem}; correct it, or give one with --chat-template-path")


def can_render(tokenizer: Any) -> bool:
    """Whether `require_template` is content."""
    return getattr(tokenizer, "chat_template", None) is not None and syntax_problem(tokenizer) is None


def syntax_problem(tokenizer: Any) -> str | None:
    """Say where the tokenizer's chat template is no Jinja, so that no conversation can be rendered; None if it is."""
    try:
        render_chat(tokenizer, [{"role": "user", "content": _PROBE}], tools=None, kwargs={})
    except jinja2.TemplateSyntaxError as error:
        return f"cannot be read: line {error.lineno}: {error.message}"
    except TEMPLATE_ERRORS:  # it is Jinja, and written for other conversations
        return None
    return None


def _special_tokens(tokenizer: Any) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", []))
    return {token for token in tokens if len(token) > 2}


def _turn_end(tokenizer: Any) -> str:
    """What the template writes after a user's words; "" if it has no such mark or cannot render the probe."""
    if getattr(tokenizer, "chat_template", None) is None:
        return ""
    try:
        rendered = render_chat(tokenizer, [{"role": "user", "content": _PROBE}], tools=None, kwargs={})
    except TEMPLATE_ERRORS:  # a template that wants a system message first, say: only the special tokens are a sign
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
