"""Chat templates under test (TPL01, TPL02, STOP01).

Does a rendered conversation only ever grow, does a turn end where generation stops, and are prompts templated twice?
Reinforcement learning over several turns appends to the tokens that the engine saw. That is the conversation the model
was trained on only if the template renders every beginning of a conversation to a beginning of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.data.chat import TEMPLATE_ERRORS, Messages, double_template_problem, render_chat
from furlong.models.chat_template import SHIPPED, read_template
from furlong.models.hf_folder import check_folder, end_ids, read_json
from furlong.models.json_tokenizer import JsonTokenizer
from furlong.tools.conversations import CONVERSATIONS, SYSTEM, TOOLS, Conversation

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
    """Where a rendered conversation does not begin with what was rendered before.

    `num_messages` were rendered first (with the generation prompt if `with_prompt`); `position` is the first character
    that differs, inside message `message`; `before` and `after` are what the two renderings have there.
    """

    num_messages: int
    with_prompt: bool
    message: int
    role: str
    position: int
    before: str
    after: str

    def text(self) -> str:
        """What was compared and what differs."""
        prompt = " and the generation prompt" if self.with_prompt else ""
        return (
            f"message {self.message} ({self.role}) differs at character {self.position}: the first "
            f"{self.num_messages} messages{prompt} render to ...{self.before!r}, the whole to ...{self.after!r}"
        )


@dataclass(frozen=True)
class ConversationCheck:
    """One conversation through one template. `refused` says why the template does not render it at all."""

    conversation: str
    thinking: str
    rewriting: PrefixMismatch | None = None
    refused: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `refused` or `rewrites`."""
        return "refused" if self.refused else "ok" if self.rewriting is None else "rewrites"


class Template:
    """A tokenizer's own template, or the Jinja source `text` in its place; `kwargs` go to every rendering."""

    def __init__(self, tokenizer: Any, text: str | None = None, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {}) | ({} if text is None else {"chat_template": text})

    def render(
        self, messages: Messages, *, tools: Sequence[dict[str, Any]] = (), prompt: bool = False, **kwargs: Any
    ) -> str:
        """Render messages; with `prompt` up to where the assistant speaks. Raises what templates raise."""
        options = {**self._kwargs, **kwargs, "add_generation_prompt": prompt}
        return render_chat(self._tokenizer, messages, tools=tools, kwargs=options)

    def trials(self, thinking: Sequence[str] = ("on", "off")) -> list[ConversationCheck]:
        """Try every scripted conversation with thinking on, off, or both; without it, those in which nobody thinks."""
        return [self._trial(c, each) for each in thinking for c in CONVERSATIONS if each == "on" or not c.thinks]

    def _trial(self, conversation: Conversation, thinking: str) -> ConversationCheck:
        try:
            found = self.first_rewriting(conversation, **THINKING[thinking])
        except TEMPLATE_ERRORS as error:
            return ConversationCheck(conversation.name, thinking, refused=f"{type(error).__name__}: {error}")
        return ConversationCheck(conversation.name, thinking, found)

    def first_rewriting(self, conversation: Conversation, **kwargs: Any) -> PrefixMismatch | None:
        """Compare every beginning of the conversation with the whole, where a rollout can stand at it.

        That is after each message from the first user's on, with the generation prompt where the assistant is to speak;
        not between the results of parallel tool calls, which come together.
        """
        messages, tools = conversation.messages, conversation.tools
        whole = self.render(messages, tools=tools, **kwargs)
        first = next(i for i, message in enumerate(messages) if message["role"] == "user")
        for count in range(first + 1, len(messages)):
            is_next = messages[count]["role"]
            if messages[count - 1]["role"] == is_next == "tool":
                continue
            prompt = is_next == "assistant"
            start = self.render(messages[:count], tools=tools, prompt=prompt, **kwargs)
            if whole.startswith(start):
                continue
            position = _shared_len(whole, start)
            index = self._message_at(conversation, count, position, **kwargs)
            where = slice(max(0, position - SHOWN), position + SHOWN)
            role = messages[index]["role"]
            return PrefixMismatch(count, prompt, index, role, position, start[where], whole[where])
        return None

    def _message_at(self, conversation: Conversation, count: int, position: int, **kwargs: Any) -> int:
        """Find the message in which a character of the first `count` messages' rendering lies."""
        for index in range(count):
            try:
                text = self.render(conversation.messages[: index + 1], tools=conversation.tools, **kwargs)
            except TEMPLATE_ERRORS:  # a system message alone, say: the character lies in a later one
                continue
            if len(text) > position:
                return index
        return count  # in the generation prompt, which stands for the message that comes next


def rewriting_findings(trials: Sequence[ConversationCheck], *, name: str, suggested: str | None) -> list[Diagnosis]:
    """TPL02, if any trial rewrites history; names the template that ships for the family, if there is one."""
    if all(trial.refused for trial in trials):
        what = f"{name} renders none of {len(trials)} conversations; the first: {trials[0].refused}"
        cause = "it is written for other messages"
        return [diagnosis("TPL02", what, cause=cause, remedy="give one with --chat-template-path FILE")]
    broken = [(trial, trial.rewriting) for trial in trials if trial.rewriting is not None]
    if not broken:
        return []
    first, rewriting = broken[0]
    remedy = "give a template that only appends with --chat-template-path FILE"
    if suggested is not None:
        remedy = f"--chat-template-path {suggested} (it ships with furlong and begins conversations alike)"
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
    """Name the shipped template that begins conversations exactly as the tokenizer's own one, and only appends.

    None if there is none, or the tokenizer has no template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    own = Template(tokenizer)
    for name in SHIPPED:
        other = Template(tokenizer, read_template(name))
        try:
            is_alike = all(
                own.render(messages, tools=tools, prompt=True, **kwargs)
                == other.render(messages, tools=tools, prompt=True, **kwargs)
                for messages, tools in PROBES
                for kwargs in ({}, *THINKING.values())
            )
        except TEMPLATE_ERRORS:  # the tokenizer's own template takes no system message or no tools: another family
            continue
        if is_alike and all(trial.verdict == "ok" for trial in other.trials()):
            return name
    return None


def stop_findings(
    tokenizer: Any, folder: Path, template: Template, *, stop_token_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> list[Diagnosis]:
    """STOP01: the token that ends an assistant's turn in the template has to be one at which generation stops."""
    stops = [*generation_ends(folder, tokenizer), *stop_token_ids]
    known, seen = f"generation stops at {_named(tokenizer, stops)}", _ends_of_turn(tokenizer, template)
    if seen is None:
        return [_unseen_end(known, stops, is_known=bool(stops or stop))]
    ends, tail = seen
    evidence = {"stop_token_ids": stops, "ends_of_turn": ends, "after_a_turn": tail}
    if missing := [end for end in ends if end not in stops]:
        ids = " ".join(map(str, missing))
        return [
            diagnosis(
                "STOP01",
                f"the chat template ends an assistant's turn with {_named(tokenizer, missing)}, but {known}",
                remedy=f"--rollout-stop-token-ids {ids}, or add it to eos_token_id in {folder}/generation_config.json",
                evidence=evidence,
            )
        ]
    if not ends and not any(text in tail for text in stop):
        return [
            diagnosis(
                "STOP01",
                f"the chat template ends an assistant's turn without a special token (it writes {tail!r}); {known}",
                cause="the model may not end its turn by itself",
                remedy=f"--rollout-stop {tail.strip() or 'TEXT'!r}: a text at which responses end",
                severity="warning",
                evidence=evidence,
            )
        ]
    return []


def _unseen_end(known: str, stops: Sequence[int], *, is_known: bool) -> Diagnosis:
    """STOP01 for a template that drops what an assistant says: what ends a turn cannot be compared."""
    way = "see that responses end there" if is_known else "--rollout-stop-token-ids N, or --rollout-stop TEXT"
    return diagnosis(
        "STOP01",
        f"the chat template leaves out an assistant's turn, so that it does not say what ends one; {known}",
        cause="It is written for prompts of one turn; a conversation of several loses what was answered.",
        remedy=f"{way}; for several turns, a template that renders them all with --chat-template-path FILE",
        severity="info" if is_known else "warning",
        evidence={"stop_token_ids": stops},
    )


def describe_ends(
    folder: Path, *, stop_token_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> tuple[str, list[int]]:
    """What ends a response of a model, and ids that end a turn in its chat template and are not among them.

    Raises ConfigError for a folder without a tokenizer.
    """
    check_folder(folder, tokenizer=True)
    tokenizer = read_tokenizer(folder)
    stops = [*generation_ends(folder, tokenizer), *stop_token_ids]
    texts = "".join(f", {text!r}" for text in stop)
    said = f"they end at {_named(tokenizer, stops)}{texts}"
    if not tokenizer.chat_template:
        return said, []
    try:
        seen = _ends_of_turn(tokenizer, Template(tokenizer))
    except TEMPLATE_ERRORS:  # a template for other conversations than the one tried
        return said, []
    missing = [end for end in seen[0] if end not in stops] if seen else []
    return said + (f", the chat template's turns at {_named(tokenizer, missing)}" if missing else ""), missing


def generation_ends(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Ids at which generation stops without any flag."""
    config = read_json(folder / "config.json")
    config_eos = config.get("eos_token_id") or config.get("text_config", {}).get("eos_token_id")
    return end_ids(read_json(folder / "generation_config.json"), config_eos, tokenizer.eos_token_id)


def foreign_marker(prompts: Sequence[str | Messages], tokenizer: Any) -> tuple[str, int] | None:
    """A mark of another family's chat template that half of the prompts hold, and how many do; None for none.

    It is another's if the tokenizer has no such token and its chat template does not write it.
    """
    known = tokenizer.get_vocab()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for mark in MARKS:
        count = sum(mark in text for text in texts)
        if count * 2 >= max(len(prompts), 1) and mark not in known and mark not in (tokenizer.chat_template or ""):
            return mark, count
    return None


def marks_of(tokenizer: Any) -> list[str]:
    """The special tokens that the tokenizer's own chat template writes."""
    return [token for token in tokenizer.all_special_tokens if token in (tokenizer.chat_template or "")]


def prompt_findings(prompts: Sequence[Any], tokenizer: Any, *, name: str) -> list[Diagnosis]:
    """TPL01: prompts that already hold what the template adds."""
    problem = double_template_problem(prompts, tokenizer)
    if problem is None:
        return []
    finding, _, remedy = problem.rpartition("; ")
    return [diagnosis("TPL01", f"{name}: {finding}", remedy=remedy)]


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; through transformers where it has no tokenizer.json. Raises ConfigError."""
    if (folder / "tokenizer.json").is_file():
        return JsonTokenizer(folder)
    from furlong.models.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def _ends_of_turn(tokenizer: Any, template: Template) -> tuple[list[int], str] | None:
    """Ids of the tokens that end an assistant's turn, and the text that the template writes after one.

    A template that writes none ends a turn by beginning the next: a user's, or a tool's. None if it drops the turn.
    """
    user, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    _, answered, tail = template.render([user, answer]).rpartition(ANSWER)
    if answered and tail.strip():
        return _first_special(tokenizer, tail), tail
    _, kept, tail = template.render([user, answer, user]).rpartition(ANSWER)
    if not (answered and kept):
        return None
    tail = tail.partition(QUESTION)[0]
    ends = _first_special(tokenizer, tail)
    call = {"type": "function", "id": "call_0", "function": {"name": "weather", "arguments": {"city": ANSWER}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_0", "content": "rain"}
    try:
        before, after = (template.render(m, tools=TOOLS) for m in ([user, asked], [user, asked, result]))
    except TEMPLATE_ERRORS:  # no tools in this template
        return ends, tail
    return list(dict.fromkeys([*ends, *_first_special(tokenizer, after[len(before) :])])), tail


def _shared_len(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _first_special(tokenizer: Any, text: str) -> list[int]:
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    return [i for i in tokenizer.encode(text, add_special_tokens=False) if i in special][:1]


# What chat templates of known families put around a turn.
MARKS = (
    "<|im_start|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "<|start_of_role|>",
    "<\uff5cUser\uff5c>",
    "<|user|>",
    "<|assistant|>",
    "<|start|>",
    "[INST]",
    "<|eot_id|>",
    "<|im_end|>",
)


def _named(tokenizer: Any, ids: Sequence[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(int(i))} ({i})" for i in dict.fromkeys(ids)) or "no token"
