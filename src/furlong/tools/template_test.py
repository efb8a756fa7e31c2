"""Tests of chat templates: rewritten history (TPL02), ends of turns (STOP01), prompts templated twice (TPL01).

Multi-turn RL appends to the tokens that the engine saw. They match the rendered conversation only if the template
renders every prefix of a conversation to a prefix of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.chat_template import TEMPLATE_ERRORS
from furlong.core.model_config import read_json
from furlong.data.prompt import Messages, double_template_problem, render_chat, rendered_prompts
from furlong.models.hf_folder import check_folder, end_ids
from furlong.models.tokenizer import SHIPPED, load_tokenizer, read_template

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages and their tools; `name` describes the case. `thinks`: only for models with a thinking mode."""

    name: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    thinks: bool = False


def _tool(name: str, parameter: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": name, "description": f"Look up by {parameter}.", "parameters": schema}
    return {"type": "function", "function": function}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str, thought: str | None = None, *calls: tuple[str, dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def _result(text: str, call: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{call}", "content": text}


SYSTEM: Message = {"role": "system", "content": "You answer in one line."}
TOOLS = [_tool("weather", "city"), _tool("train", "station")]
RIGA, OSLO, TRAIN = ("weather", {"city": "Riga"}), ("weather", {"city": "Oslo"}), ("train", {"station": "Riga"})
CONVERSATIONS = (
    Conversation("one turn", [_user("Name a river."), _assistant("The Elbe.")]),
    Conversation("several turns", [
        SYSTEM, _user("Name a river."), _assistant("The Elbe."), _user("Another."), _assistant("The Oder."),
        _user("Thanks."),
    ]),
    Conversation("thinking, several turns", [
        SYSTEM, _user("What is 17 + 25?"), _assistant("42", "7 + 5 is 12, so 42."), _user("And 42 + 9?"),
        _assistant("51", "2 + 9 is 11."), _user("Good."), _assistant("Anything else?"),
    ], thinks=True),
    Conversation("thinking inside the text", [
        _user("What is 17 + 25?"), _assistant("<think>\n7 + 5 is 12.\n</think>\n\n42"), _user("And 42 + 9?"),
        _assistant("<think>\n2 + 9 is 11.\n</think>\n\n51"),
    ], thinks=True),
    Conversation("a tool call", [
        _user("Weather in Riga?"), _assistant("", None, RIGA), _result("rain"), _assistant("It rains."),
        _user("Thanks."), _assistant("You are welcome."),
    ], TOOLS),
    Conversation("parallel tool calls", [
        SYSTEM, _user("Weather in Riga, and the next train?"), _assistant("I look.", None, RIGA, TRAIN),
        _result("rain"), _result("18:05", 1), _assistant("Rain; 18:05."), _user("And in Oslo?"),
        _assistant("", None, OSLO), _result("snow"), _assistant("Snow."),
    ], TOOLS),
    Conversation("thinking between tool calls", [
        _user("Is it warmer in Riga or in Oslo?"), _assistant("", "Riga first.", RIGA), _result("4 degrees"),
        _assistant("", "Now Oslo.", OSLO), _result("-2 degrees"), _assistant("In Riga.", "4 is above -2."),
        _user("By how much?"), _assistant("6 degrees.", "4 + 2."),
    ], TOOLS, thinks=True),
)  # fmt: skip

SHOWN = 40  # characters on either side of a difference
QUESTION, ANSWER = "furlong-question-2741", "furlong-answer-5830"
PROBES: tuple[tuple[Messages, list[dict[str, Any]]], ...] = (
    ([{"role": "user", "content": "Name a river."}], []),
    ([SYSTEM, {"role": "user", "content": "Name a river."}], []),
    ([SYSTEM, {"role": "user", "content": "Weather in Riga?"}], TOOLS),
)
THINKING: Mapping[str, dict[str, Any]] = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}


@dataclass(frozen=True)
class PrefixMismatch:
    """The first difference between a rendered prefix of a conversation and the rendered whole.

    The prefix has `num_messages` (and the generation prompt if `with_prompt`); `position` is the first character that
    differs, in message `message`; `before` and `after` are excerpts of the two renderings.
    """

    num_messages: int
    with_prompt: bool
    message: int
    role: str
    position: int
    before: str
    after: str

    def text(self) -> str:
        """Describe what was compared and what differs."""
        prompt = " and the generation prompt" if self.with_prompt else ""
        return (
            f"message {self.message} ({self.role}) differs at character {self.position}: the first "
            f"{self.num_messages} messages{prompt} render to ...{self.before!r}, the whole to ...{self.after!r}"
        )


@dataclass(frozen=True)
class ConversationCheck:
    """The result of one conversation with one template. `refused`: why the template does not render it."""

    conversation: str
    thinking: str
    rewriting: PrefixMismatch | None = None
    refused: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `refused` or `rewrites`."""
        return "refused" if self.refused else "ok" if self.rewriting is None else "rewrites"


class Template:
    """A tokenizer's template, or the Jinja source `text` instead; `kwargs` are passed to every rendering."""

    def __init__(self, tokenizer: Any, text: str | None = None, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {}) | ({} if text is None else {"chat_template": text})

    def render(
        self, messages: Messages, *, tools: Sequence[dict[str, Any]] = (), prompt: bool = False, **kwargs: Any
    ) -> str:
        """Render messages, with the generation prompt if `prompt`. Raises TEMPLATE_ERRORS."""
        options = {**self._kwargs, **kwargs, "add_generation_prompt": prompt}
        return render_chat(self._tokenizer, messages, tools=tools, kwargs=options)

    def trials(self, thinking: Sequence[str] = ("on", "off")) -> list[ConversationCheck]:
        """Check the scripted conversations with thinking on, off, or both; with it off, those without thoughts."""
        checks: list[ConversationCheck] = []
        for each in thinking:
            for conversation in CONVERSATIONS:
                if each == "off" and conversation.thinks:
                    continue
                mismatch, refused = None, ""
                try:
                    mismatch = self.first_rewriting(conversation, **THINKING[each])
                except TEMPLATE_ERRORS as error:
                    refused = f"{type(error).__name__}: {error}"
                checks.append(ConversationCheck(conversation.name, each, mismatch, refused))
        return checks

    def first_rewriting(self, conversation: Conversation, **kwargs: Any) -> PrefixMismatch | None:
        """Compare every prefix at which a rollout can be with the whole conversation; return the first mismatch.

        Prefixes end after each message from the first user's on, with the generation prompt before an assistant's turn,
        but not between the results of parallel tool calls.
        """
        messages, tools = conversation.messages, conversation.tools
        whole = self.render(messages, tools=tools, **kwargs)
        first = next(i for i, message in enumerate(messages) if message["role"] == "user")
        for count in range(first + 1, len(messages)):
            next_role = messages[count]["role"]
            if messages[count - 1]["role"] == next_role == "tool":
                continue
            prompt = next_role == "assistant"
            start = self.render(messages[:count], tools=tools, prompt=prompt, **kwargs)
            if whole.startswith(start):
                continue
            same = (a == b for a, b in zip(whole, start, strict=False))
            position = next((i for i, each in enumerate(same) if not each), min(len(whole), len(start)))
            index = count  # in the generation prompt, which belongs to the next message
            for number in range(count):
                try:
                    text = self.render(messages[: number + 1], tools=tools, **kwargs)
                except TEMPLATE_ERRORS:  # for example a system message alone; the character is in a later one
                    continue
                if len(text) > position:
                    index = number
                    break
            where = slice(max(0, position - SHOWN), position + SHOWN)
            role = messages[index]["role"]
            return PrefixMismatch(count, prompt, index, role, position, start[where], whole[where])
        return None


def rewriting_findings(trials: Sequence[ConversationCheck], *, name: str, suggested: str | None) -> list[Diagnosis]:
    """TPL02: a conversation is rewritten; `suggested` is a shipped template of the family."""
    if all(trial.refused for trial in trials):
        finding = f"{name} renders none of {len(trials)} conversations; the first: {trials[0].refused}"
        cause = "It expects another message format."
        return [diagnosis("TPL02", finding, cause=cause, remedy="use another one with --chat-template-path FILE")]
    broken = [(trial, trial.rewriting) for trial in trials if trial.rewriting is not None]
    if not broken:
        return []
    first, rewriting = broken[0]
    remedy = "use a template that only appends with --chat-template-path FILE"
    if suggested is not None:
        remedy = f"use --chat-template-path {suggested} (shipped with furlong, with the same format)"
    return [
        diagnosis(
            "TPL02",
            f"{name} rewrites history in {len(broken)} of {len(trials)} conversations; in '{first.conversation}' "
            f"(thinking {first.thinking}) {rewriting.text()}",
            remedy=remedy,
            evidence={
                "conversations": [[t.conversation, t.thinking, r.text()] for t, r in broken],
                "suggested": suggested,
            },
        )
    ]


def suggested_template(tokenizer: Any) -> str | None:
    """Return the shipped template that starts conversations like the tokenizer's, and only appends.

    None if there is none, or the tokenizer has no template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    current = Template(tokenizer)
    for name in SHIPPED:
        other = Template(tokenizer, read_template(name))
        try:
            is_alike = all(
                current.render(messages, tools=tools, prompt=True, **kwargs)
                == other.render(messages, tools=tools, prompt=True, **kwargs)
                for messages, tools in PROBES
                for kwargs in ({}, *THINKING.values())
            )
        except TEMPLATE_ERRORS:  # the tokenizer's template supports no system message or tools: another family
            continue
        if is_alike and all(trial.verdict == "ok" for trial in other.trials()):
            return name
    return None


def stop_findings(
    tokenizer: Any, folder: Path, template: Template, *, stop_token_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> list[Diagnosis]:
    """STOP01: the token that ends an assistant's turn in the template does not stop generation."""
    stops = [*generation_ends(folder, tokenizer), *stop_token_ids]
    stops_at, turn = f"generation stops at {_token_names(tokenizer, stops)}", _ends_of_turn(tokenizer, template)
    if turn is None:
        is_known = bool(stops or stop)
        fix = "check that responses end there" if is_known else "set --rollout-stop-token-ids N, or --rollout-stop TEXT"
        return [
            diagnosis(
                "STOP01",
                f"the chat template drops the assistant's turn, so it does not show what ends one; {stops_at}",
                cause="It is meant for single-turn prompts; in longer conversations the answers are lost.",
                remedy=f"{fix}; for several turns, use a template that renders all of them with --chat-template-path "
                "FILE",
                severity="info" if is_known else "warning",
                evidence={"stop_token_ids": stops},
            )
        ]
    ends, tail = turn
    evidence = {"stop_token_ids": stops, "ends_of_turn": ends, "after_a_turn": tail}
    if missing := [end for end in ends if end not in stops]:
        ids = " ".join(map(str, missing))
        return [
            diagnosis(
                "STOP01",
                f"the chat template ends an assistant's turn with {_token_names(tokenizer, missing)}, but {stops_at}",
                remedy=f"set --rollout-stop-token-ids {ids}, or extend eos_token_id in {folder}/generation_config.json",
                evidence=evidence,
            )
        ]
    if not ends and not any(text in tail for text in stop):
        return [
            diagnosis(
                "STOP01",
                f"the chat template ends an assistant's turn without a special token (it writes {tail!r}); {stops_at}",
                cause="The model may not end its turn by itself.",
                remedy=f"set --rollout-stop {tail.strip() or 'TEXT'!r} to end responses at that text",
                severity="warning",
                evidence=evidence,
            )
        ]
    return []


def describe_ends(
    folder: Path, *, stop_token_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> tuple[str, list[int]]:
    """Describe what ends a model's responses, and list ids that end a turn in its chat template but not a response.

    Raises ConfigError for a folder without a tokenizer.
    """
    check_folder(folder, tokenizer=True)
    tokenizer = load_tokenizer(folder)
    stops = [*generation_ends(folder, tokenizer), *stop_token_ids]
    texts = "".join(f", {text!r}" for text in stop)
    description = f"they end at {_token_names(tokenizer, stops)}{texts}"
    if not tokenizer.chat_template:
        return description, []
    try:
        turn = _ends_of_turn(tokenizer, Template(tokenizer))
    except TEMPLATE_ERRORS:  # the template does not accept the probe conversation
        return description, []
    missing = [end for end in turn[0] if end not in stops] if turn else []
    if missing:
        description += f", turns of the chat template at {_token_names(tokenizer, missing)}"
    return description, missing


def generation_ends(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids at which generation stops by default."""
    config = read_json(folder / "config.json")
    config_eos = config.get("eos_token_id") or config.get("text_config", {}).get("eos_token_id")
    return end_ids(read_json(folder / "generation_config.json"), config_eos, tokenizer.eos_token_id)


def foreign_marker(prompts: Sequence[str | Messages], tokenizer: Any) -> tuple[str, int] | None:
    """Find a marker of another family's chat template in a tenth of the prompts or more; return it and their number.

    A marker is foreign if it is neither a token of the tokenizer nor in its chat template.
    """
    known = tokenizer.get_vocab()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for mark in MARKS:
        count = sum(mark in text for text in texts)
        is_known = mark in known or mark in (tokenizer.chat_template or "")
        if count >= max(MIXED * len(prompts), 2) and not is_known:
            return mark, count
    return None


def marks_of(tokenizer: Any) -> list[str]:
    """Return the special tokens in the tokenizer's chat template."""
    return [token for token in tokenizer.all_special_tokens if token in (tokenizer.chat_template or "")]


def prompt_findings(prompts: Sequence[Any], tokenizer: Any, *, name: str) -> list[Diagnosis]:
    """TPL01: prompts that already contain what the template adds."""
    problem = double_template_problem(prompts, tokenizer)
    if problem is None:
        return []
    finding, _, remedy = problem.rpartition("; ")
    share = len(rendered_prompts(prompts, tokenizer)) / len(prompts)
    severity = None if share >= MIXED else "warning"  # a few may quote a template
    return [diagnosis("TPL01", f"{name}: {finding}", remedy=remedy, severity=severity)]


def _ends_of_turn(tokenizer: Any, template: Template) -> tuple[list[int], str] | None:
    """Return the ids that end an assistant's turn, and the text after it; None if the template drops the turn.

    If there is no text after a turn, the start of the next one (a user's, or a tool's) ends it.
    """
    user, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    _, has_answer, tail = template.render([user, answer]).rpartition(ANSWER)
    if has_answer and tail.strip():
        return _first_special(tokenizer, tail), tail
    _, keeps_answer, tail = template.render([user, answer, user]).rpartition(ANSWER)
    if not (has_answer and keeps_answer):
        return None
    tail = tail.partition(QUESTION)[0]
    ends = _first_special(tokenizer, tail)
    call = {"type": "function", "id": "call_0", "function": {"name": "weather", "arguments": {"city": ANSWER}}}
    request = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_0", "content": "rain"}
    try:
        before, after = (template.render(m, tools=TOOLS) for m in ([user, request], [user, request, result]))
    except TEMPLATE_ERRORS:  # the template does not support tools
        return ends, tail
    return list(dict.fromkeys([*ends, *_first_special(tokenizer, after[len(before) :])])), tail


def _first_special(tokenizer: Any, text: str) -> list[int]:
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    return [i for i in tokenizer.encode(text, add_special_tokens=False) if i in special][:1]


# Turn markers in the chat templates of known families.
MIXED = 0.1  # share of rendered prompts from which on a file is taken for a mixture; a question may quote a template
MARKS = (
    "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start_of_role|>", "<\uff5cUser\uff5c>", "<|user|>",
    "<|assistant|>", "<|start|>", "[INST]", "<|eot_id|>", "<|im_end|>",
)  # fmt: skip


def _token_names(tokenizer: Any, ids: Sequence[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(int(i))} ({i})" for i in dict.fromkeys(ids)) or "no token"
