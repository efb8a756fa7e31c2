"""Token ids of a conversation that grows: the ids known so far stay, and only the new messages are rendered.

Between the last sampled token and the next message a template writes text that the model did not: a line break after
Qwen's `<|im_end|>`. Rendering the whole conversation again would change the ids of earlier answers. Here the new
messages are rendered after a short conversation that ends with a marked answer, and the text after the mark is encoded.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from furlong.chat.messages import Message, MessageError, TextParts, longest_token
from furlong.core.chat_template import TEMPLATE_ERRORS, apply_template

logger = logging.getLogger(__name__)

MARK = "ZqMARKqZ"  # stands for the text of an answer; no template trims or splits it
MAX_CLOSINGS = 256  # texts that are kept

# Reasoning that templates drop from earlier answers; stored ids keep it (`--session-history keep`).
_REASONING = re.compile(
    r"<think>.*?</think>\s*|<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant", re.DOTALL
)
# Templates that loop over the parts of a message, by SGLang's rule (sglang/srt/parser/jinja_template_utils.py).
_LOOPS_OVER_PARTS = re.compile(
    r"image|audio|video|vision|\bfor\s+\w+\s+in\s+(?:message|msg|m)(?:\.content|\[\s*['\"]content['\"]\s*\])(?!\s*[.(])"
)
_QUESTION: list[Message] = [{"role": "user", "content": "x"}]
_CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}],
}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class RewrittenError(MessageError):
    """The template renders an answer otherwise once messages follow, so that nothing can be appended to it."""


@dataclass(frozen=True)
class Extension:
    """What the template writes after an answer. closing: to its end; rest: new messages and the next start."""

    closing: str
    rest: str


@dataclass(frozen=True)
class Proof:
    """For which requests the template only appends: with or without tools, by the role of the new messages.

    reasons: why not, by (has tools, role).
    """

    reasons: Mapping[tuple[bool, str], str] = field(default_factory=dict[tuple[bool, str], str])

    def problem(self, new: Sequence[Message], *, has_tools: bool) -> str | None:
        """Return why these messages cannot be appended without rendering the others again; None if they can."""
        return next((self.reasons[has_tools, m["role"]] for m in new if (has_tools, m["role"]) in self.reasons), None)


class ChatFormat:
    """Renders and encodes the messages of one tokenizer with its chat template, or with `chat_template`.

    kwargs: keyword arguments of the template for all conversations. Thread-safe.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.source: str = str(chat_template or getattr(tokenizer, "chat_template", None) or "")
        self._kwargs = kwargs | ({"chat_template": chat_template} if chat_template else {})
        self._proof: Proof | None = None
        self._closings: dict[str, str] = {}  # by tools and kwargs
        self._written: dict[str, bool] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the tokenizer's longest token."""
        return longest_token(self.tokenizer)

    @functools.cached_property
    def _loops_over_parts(self) -> bool:
        return _LOOPS_OVER_PARTS.search(self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        opens_answer: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of messages. Raises MessageError if the template rejects them, or if there is none.

        Messages of roles that the template does not write have the nearest role that it does (`_with_known_roles`).
        """
        return self._apply(self._with_known_roles(messages), tools, opens_answer, kwargs)

    def _apply(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        opens_answer: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        if not self.source:
            raise MessageError(
                "the tokenizer has no chat template; add one with --chat-template-path, or send token ids to "
                "/inference/v1/generate"
            )
        options = {**self._kwargs, **(kwargs or {})}
        if self._loops_over_parts:
            messages = [_with_parts(message) for message in messages]
        try:
            return str(
                apply_template(
                    self.tokenizer,
                    messages,
                    tools=tools or None,
                    add_generation_prompt=opens_answer,
                    tokenize=False,
                    **options,
                )
            )
        except TEMPLATE_ERRORS as error:
            raise MessageError(
                f"the chat template rejects these messages ({type(error).__name__}): {str(error)[:300]}"
            ) from error

    def _with_known_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages in roles that the template writes: developer as system, function as tool.

        A system message after other messages is a user's in templates that have no place for it there. What changed its
        role is joined to a neighbor of the same role, because some templates require that roles alternate.
        """
        if not any(self._is_rare(i, message) for i, message in enumerate(messages)):
            return messages
        known: list[tuple[Message, bool]] = []  # with whether the role changed
        for message in messages:
            role = str(message["role"])
            if role in ("developer", "function") and not self._writes(role):
                role = {"developer": "system", "function": "tool"}[role]
            is_misplaced = role == "system" and bool(known) and not self._writes("late system")
            if is_misplaced and any(each["role"] != "system" for each, _ in known):
                role = "user"
            is_changed = is_misplaced or role != message["role"]
            before = known[-1] if known else None
            if before is not None and before[0]["role"] == role != "tool" and (is_changed or before[1]):
                joined = {**before[0], "content": f"{before[0]['content']}\n\n{message['content']}"}
                known[-1] = joined, True
            else:
                known.append(({**message, "role": role} if is_changed else message, is_changed))
        return [message for message, _ in known]

    @staticmethod
    def _is_rare(place: int, message: Message) -> bool:
        return message["role"] in ("developer", "function") or (place > 0 and message["role"] == "system")

    def _writes(self, kind: Literal["developer", "function", "late system"]) -> bool:
        """Return whether the template writes the text of such a message; the log says once if it does not."""
        if kind not in self._written:
            role = kind.removeprefix("late ")
            probe: list[Message] = [{"role": role, "content": MARK, "name": "look_up"}]
            probe = {
                "developer": [*probe, *_QUESTION],
                "function": [*_QUESTION, _CALLING, *probe],
                "late system": [*_QUESTION, *probe],
            }[kind]
            try:
                text = self._apply(probe, [_TOOL] if kind == "function" else None)
            except MessageError:
                text = ""
            self._written[kind] = MARK in text
            if MARK not in text:
                other = {"developer": "system", "function": "tool", "late system": "user"}[kind]
                what = "system messages after the first message" if kind == "late system" else f"role {role}"
                logger.info("the chat template does not write %s; such messages have the role %s", what, other)
        return self._written[kind]

    def check_written(
        self,
        text: str,
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise MessageError if one of the `new` messages, the last of `messages`, is not in the rendered `text`.

        Answers may lose their text, as reasoning does in many templates.
        """
        for i, message in enumerate(new, len(messages) - len(new)):
            content = message["content"].strip()
            if message["role"] == "assistant" or content in text or json.dumps(content)[1:-1] in text:
                continue
            marked = [*messages[:i], {**message, "content": MARK}, *messages[i + 1 :]]
            if MARK not in self.render(marked, tools=tools, kwargs=kwargs):
                raise MessageError(
                    f"messages[{i}] of role {message['role']} is not in the prompt: the chat template does not write "
                    f"it there ({content[:60]!r}); use another role, or another --chat-template-path"
                )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without added special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""

    def appended(
        self,
        answer: Message,
        last_token: str,
        new: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text from the end of a sampled answer to the beginning of the next one.

        last_token: text of the last sampled token. If the template ends answers with it, the text begins after it;
        otherwise (an answer that was cut) the end of the turn is part of the text. Raises MessageError.
        """
        extension = self.extension(_QUESTION, answer, new, tools=tools, kwargs=kwargs)
        closing, rest = extension.closing, extension.rest
        if last_token and last_token in closing:
            return closing.rpartition(last_token)[2] + rest
        if last_token and rest.startswith(last_token):  # delimiters that end a turn and begin the next one (GLM)
            return rest[len(last_token) :]
        return self._closing(_QUESTION, _marked({}), tools, kwargs) + rest

    def extension(
        self,
        before: Sequence[Message],
        answer: Message,
        new: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Extension:
        """Return what the template writes after `answer` in the conversation `before` + answer + `new`."""
        marked = _marked(answer)
        closing = self._closing(before, marked, tools, kwargs)
        whole = self._tail(before, marked, new, tools, kwargs, opens_answer=True)
        if whole.startswith(closing):
            return Extension(closing, whole[len(closing) :])
        ends = self.encode(closing), self.encode(whole)  # gpt-oss: <|return|> at the very end, <|end|> elsewhere
        other = self.decode(ends[1][:1])
        if len(ends[0]) == 1 and ends[1] and other in self._special and whole.startswith(other):
            return Extension(closing, whole[len(other) :])
        raise RewrittenError(
            f"the chat template ends an answer with {closing[:60]!r}, but with {whole[:60]!r} if messages follow"
        )

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that may end an answer: the special and added tokens."""
        added: Any = getattr(self.tokenizer, "added_tokens_decoder", {})
        eos: Any = getattr(self.tokenizer, "eos_token_id", None)
        ids = {*getattr(self.tokenizer, "all_special_ids", ()), *added, *([] if eos is None else [eos])}
        return frozenset(map(int, ids))

    @property
    def _special(self) -> set[str]:
        return set(map(str, getattr(self.tokenizer, "all_special_tokens", ())))

    def _closing(
        self, before: Sequence[Message], marked: Message, tools: list[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> str:
        """Return the rendered text from the mark to the end of the answer; for plain answers, it is kept."""
        if before is not _QUESTION or "tool_calls" in marked:
            return self._tail(before, marked, (), tools, kwargs)
        key = json.dumps([tools, kwargs], sort_keys=True, default=str)
        if key not in self._closings:
            if len(self._closings) >= MAX_CLOSINGS:
                self._closings.clear()
            self._closings[key] = self._tail(before, marked, (), tools, kwargs)
        return self._closings[key]

    def _tail(
        self,
        before: Sequence[Message],
        marked: Message,
        new: Sequence[Message],
        tools: list[Any] | None,
        kwargs: Mapping[str, Any] | None,
        *,
        opens_answer: bool = False,
    ) -> str:
        text = self.render([*before, marked, *new], tools=tools, opens_answer=opens_answer, kwargs=kwargs)
        _, found, tail = text.partition(MARK)
        if not found:
            raise RewrittenError("the chat template does not write the text of the last answer")
        return tail

    # -- proof -------------------------------------------------------------------------------------------------

    @property
    def is_proven(self) -> bool:
        """Whether `proof` has its result."""
        return self._proof is not None

    def proof(self) -> Proof:
        """Check on conversations of each kind whether the template only appends; the first call takes about 20 ms."""
        with self._lock:
            if self._proof is None:
                reasons: dict[tuple[bool, str], str] = {}
                for trial in _trials():
                    try:
                        problem = self._problem(trial)
                    except RewrittenError as error:  # some templates write no tool calls; such answers are not extended
                        problem = None if trial.answer.get("tool_calls") else str(error)
                    except MessageError:  # some templates reject some orders of roles
                        continue
                    if problem:
                        reasons.setdefault((trial.tools is not None, trial.role), problem)
                self._proof = Proof(reasons)
            return self._proof

    def _problem(self, trial: _Trial) -> str | None:
        """Return how the template rewrites earlier text of this conversation; None if it appends."""
        before, answer, new, tools = trial.before, trial.answer, trial.new, trial.tools
        short = self.extension(_QUESTION, answer, new, tools=tools)
        whole = self.extension(before, answer, new, tools=tools)
        if short != whole:
            return f"what it writes after an answer depends on earlier messages: {whole.rest[:60]!r}"
        marked = _marked(answer)
        alone = self.render([*before, marked], tools=tools, opens_answer=False)
        extended = self.render([*before, marked, *new], tools=tools)
        texts = [_REASONING.sub("", text.partition(MARK)[0]) for text in (alone, extended)]
        if texts[0] != texts[1]:
            at = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            return f"new messages change earlier text from {texts[0][at : at + 40]!r} to {texts[1][at : at + 40]!r}"
        return None


def _with_parts(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, TextParts):
        return message
    return {**message, "content": [{"type": "text", "text": text} for text in content.texts]}


def _marked(answer: Message) -> Message:
    """Return the answer with the mark where its text, or the arguments of its last tool call, would be."""
    calls = [dict(call) for call in answer.get("tool_calls", ())]
    if not calls:
        return {"role": "assistant", "content": MARK}
    calls[-1]["function"] = {**calls[-1]["function"], "arguments": json.dumps({"word": MARK})}
    return {"role": "assistant", "content": "", "tool_calls": calls}


@dataclass(frozen=True)
class _Trial:
    """A conversation: `new` messages of one role after `answer`."""

    before: list[Message]
    answer: Message
    new: list[Message]
    role: str
    tools: list[Any] | None


def _trials() -> Iterator[_Trial]:
    """Yield a short and a long conversation for each role of the new messages, with and without tools."""
    call: dict[str, Any] = {"id": "a1b2c3d4e", "type": "function"}  # Mistral's templates require ids of 9 characters
    call["function"] = {"name": "look_up", "arguments": json.dumps({"word": "blue river"})}
    result: Message = {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": "{x} 42"}
    thought: Message = {"role": "assistant", "content": "a <b> z", "reasoning_content": "a\n\nriver z"}
    plain: Message = {"role": "assistant", "content": "élan\nno ..."}
    asks: list[Message] = [{"role": "user", "content": f"a {word} z"} for word in ("blue", "river\n", "42", "...")]
    calling: Message = {"role": "assistant", "content": "a no z", "tool_calls": [call]}
    for tools in (None, [_TOOL]):
        turns = [asks[1], plain] if tools is None else [asks[1], calling, result, plain]
        long = [{"role": "system", "content": "be brief"}, asks[0], thought, *turns, asks[2], plain, asks[3]]
        for before in (asks[:1], long, long[1:]):
            for role in ("user", "tool", "system", "developer", "assistant"):
                if role == "tool":
                    if tools is not None:
                        yield _Trial(before, calling, [result], role, tools)
                    continue
                new: Message = {"role": role, "content": "a {x} z"}
                news = [asks[2], new, asks[3]] if role == "assistant" else [new]
                yield _Trial(before, plain, news, role, tools)
