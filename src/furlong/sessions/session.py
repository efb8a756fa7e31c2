"""A session: an agent's conversation with the policy, answered from the exact ids of earlier turns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import xxhash

from furlong.chat.messages import (
    CheckedMessages,
    KeyFunction,
    Message,
    MessageError,
    canonical,
    checked_messages,
    key_of,
    num_chars,
)
from furlong.chat.parsers import PARSERS, GrowingReply, ParsedReply, ToolParser, parse_reply, parser_of_template
from furlong.chat.template_boundary import ChatFormat, RewrittenError
from furlong.chat.text_deltas import TextDeltas
from furlong.core.token_stream import TokenStream
from furlong.errors import RolloutError
from furlong.interfaces import Completion, FinishReason, SamplingParams
from furlong.sessions.json_replies import JsonReply
from furlong.sessions.tree import ChatRequest, SessionTree, TreeNode, hash_of


class EndedError(RolloutError):
    """The session has ended. `status` and `api_code` are those of an HTTP reply."""

    status, api_code = 410, "session_ended"


class FullContextError(RolloutError):
    """A prompt leaves no room for an answer. `status` and `api_code` are those of an HTTP reply."""

    status, api_code = 400, "context_length_exceeded"


class LimitReachedError(RolloutError):
    """A limit of the episode ends its answers. `status`, `api_code` and `headers` are those of an HTTP reply.

    Clients of OpenAI and Anthropic do not repeat a request after such a reply.
    """

    status, api_code, headers = 429, "rate_limit_exceeded", {"x-should-retry": "false"}


ROLE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_role(name: str) -> None:
    """Raise RolloutError for a name that cannot be part of a URL and of metrics."""
    if not ROLE_NAME.fullmatch(name):
        raise RolloutError(
            f"a role is named {name[:80]!r}; use 1 to 64 letters, digits, '_', '-' and '.': the name is part of URLs "
            "and metrics"
        )


@dataclass(frozen=True)
class Reply:
    """An answer of the policy.

    message: as clients append it to their messages. tokens, log_probs and versions are those of the engine;
    prompt_tokens is the number of ids that it read, of which it had cached_tokens. texts (of the tokens)
    and prompt_ids are empty unless a client asked for them.
    """

    message: Message
    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    id: str
    node: TreeNode | None = field(default=None, repr=False)
    texts: list[str] = field(default_factory=list[str], repr=False)
    prompt_ids: list[int] = field(default_factory=list[int], repr=False)

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls."""
        return self.message["content"] or ""

    @property
    def reasoning(self) -> str | None:
        """The reasoning, if the reply has any."""
        return self.message.get("reasoning_content")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's form: `id`, `function.name` and `function.arguments`, which is JSON text."""
        return self.message.get("tool_calls", [])


@dataclass(frozen=True)
class ReplyPiece:
    """What an answer grew by: tokens with their log-probs, and the text that is final by now.

    texts: of the tokens one by one, if they are wanted.
    """

    reasoning: str = ""
    content: str = ""
    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    texts: list[str] = field(default_factory=list[str])

    def joined(self, other: ReplyPiece) -> ReplyPiece:
        """Return one piece of two that follow each other."""
        return ReplyPiece(
            self.reasoning + other.reasoning,
            self.content + other.content,
            [*self.tokens, *other.tokens],
            [*self.log_probs, *other.log_probs],
            [*self.texts, *other.texts],
        )


class ReplyStream:
    """Collects the pieces of one answer, for any number of readers. `on_change` is called after each piece.

    The text of tool calls is in no piece: calls are sent when the answer is complete. `response_id` and `prompt_tokens`
    are set when the engine is called. wants_texts: pieces have the text of each token.
    """

    def __init__(self, on_change: Callable[[], None], *, wants_texts: bool = False) -> None:
        self.pieces: list[ReplyPiece] = []
        self.tokens = TokenStream(self._grow)
        self.response_id, self.prompt_tokens = "", 0
        self._on_change, self._wants_texts = on_change, wants_texts
        self._decode: Callable[[list[int]], str] = str
        self._parts: Callable[[list[int]], tuple[str, str]] = lambda _: ("", "")
        self._num_tokens = 0
        self._num_sent = [0, 0]  # characters of reasoning and content

    def begin(
        self,
        response_id: str,
        prompt_tokens: int,
        *,
        parts: Callable[[list[int]], tuple[str, str]],
        decode: Callable[[list[int]], str],
    ) -> None:
        """Set how tokens become new reasoning and content that are final."""
        self.response_id, self.prompt_tokens = response_id, prompt_tokens
        self._parts, self._decode = parts, decode

    def stop(self) -> None:
        """End the answer: its last client is gone."""
        self.tokens.stop()

    def finish(self, parsed: ParsedReply, completion: Completion) -> None:
        """Add the rest of the answer."""
        sent = self._num_sent
        self._add(
            ((parsed.reasoning or "")[sent[0] :], parsed.content[sent[1] :]), completion.tokens, completion.log_probs
        )

    def _grow(self) -> None:
        self._add(self._parts(self.tokens.tokens), self.tokens.tokens, self.tokens.log_probs)

    def _add(self, new: tuple[str, str], tokens: list[int], log_probs: list[float]) -> None:
        self._num_sent = [self._num_sent[0] + len(new[0]), self._num_sent[1] + len(new[1])]
        start, self._num_tokens = self._num_tokens, max(self._num_tokens, len(tokens))
        texts = [self._decode([token]) for token in tokens[start:]] if self._wants_texts else []
        self.pieces.append(ReplyPiece(*new, tokens[start:], log_probs[start:], texts))
        self._on_change()


Complete = Callable[..., Awaitable[Completion]]
"""Completes ids with parameters. The third argument selects the random numbers, None for those of the next call of the
sample; the fourth, of streamed answers only, gets the tokens as they are sampled."""

MAX_CALLS = 1 << 21  # random numbers of branches begin beyond those of calls and of continued requests
FEW, SMALL = 64, 1 << 15  # messages, and their characters, that are processed on the event loop
_ID_CHARS = "0123456789abcdefghijklmnopqrstuvwxyz"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionSettings:
    """How sessions match messages and keep history: the flags `--session-*`.

    key: identifies equal messages. history: "keep" keeps stored ids; "template" renders the conversation again, and
    what differs is a branch. parser: of tool calls; None for the one that the chat template suggests.
    """

    key: KeyFunction = key_of
    history: Literal["keep", "template"] = "keep"
    parser: ToolParser | None = None


@dataclass(frozen=True)
class _Prompt:
    """Where a request attaches, and the ids of the engine's prompt."""

    parent: TreeNode | None
    ids: list[int]
    text: str  # its end, which shows whether a thought is open
    is_rewritten: bool = False  # the messages are known, and the template renders them otherwise than before

    @property
    def is_opened(self) -> bool:
        """Whether it ends with an open thought."""
        return self.text.rstrip().endswith("<think>")


class Session:
    """The conversation of one episode. `complete` calls the engine; `params` are the sampling parameters of the run.

    context_len limits prompt and answer together; None for no limit. `limit` returns the limit of the episode that was
    reached, "" if none was. All methods run on one event loop.
    """

    def __init__(
        self,
        chat: ChatFormat,
        complete: Complete,
        *,
        name: str,
        params: SamplingParams,
        settings: SessionSettings | None = None,
        context_len: int | None = None,
        limit: Callable[[], str] = str,
    ) -> None:
        self.name, self.params, self.context_len = name, params, context_len
        self._limit = limit
        self.chat_format = chat
        self.settings = settings or SessionSettings()
        self.tree = SessionTree(self.settings.key)
        self.counts: Counter[str] = Counter()  # of ill-formed calls, overridden parameters and kept prefixes
        self.end_reason = ""  # why it has ended; "" while it is open
        self.frozen_roles: set[str] = set()  # whose answers are not trained on
        self.role_groups: dict[str, str] = {}  # of roles that are compared within the episode
        self._complete = complete
        self._started: Counter[int] = Counter()  # calls by the number of the node that they attach to
        self._asked: Counter[int] = Counter()  # calls by the hash of their prompt
        self._num_asked = 0
        suggested = parser_of_template(chat.source)
        self.parser = self.settings.parser or (None if suggested is None else PARSERS[suggested])

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        params: SamplingParams | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        role: str = "",
        reads_calls: bool = True,
        json_reply: JsonReply | None = None,
        max_calls: int | None = None,
        stream: ReplyStream | None = None,
    ) -> Reply:
        """Answer chat messages. `stream` gets the answer as it is sampled, or at its end if it must be JSON.

        Raises MessageError for messages that cannot be rendered, FullContextError if they leave no room for an answer,
        EndedError after `end`, and LimitReachedError.
        """
        self._check_open()
        if self.tree.nodes:
            self._check_limit()
        request, prompt = await self._read(messages, tools, template_kwargs, role)
        if reason := "stripped" if prompt.is_rewritten else self.tree.branch_reason(request, prompt.parent, role):
            self.tree.branch_reasons[reason] += 1
        if json_reply is not None:
            if prompt.is_opened:
                raise MessageError(
                    "the chat template opens a thought, which cannot be JSON: a reply with tool_choice or "
                    'response_format needs chat_template_kwargs {"enable_thinking": false}'
                )
            schema = json_reply.text(tools or ())
            params = replace(params or self.params, json_schema=schema, min_new_tokens=0)
        tools = tools if reads_calls else None
        node = await self._sample(prompt, params, request=request, role=role, stream=stream, has_tools=bool(tools))
        parsed = self._parse(node, prompt, tools, json_reply)
        calls = parsed.calls[:max_calls]
        message = self._message(parsed, calls, node.response_id)
        node.reply = checked_messages([message])[0]
        self.tree.commit(node, request)
        if stream is not None:
            stream.finish(parsed, node.completion)
        return _reply(node, message)

    async def complete(self, ids: Sequence[int], *, params: SamplingParams | None = None, role: str = "") -> Reply:
        """Answer token ids; the reply's text is not parsed. Raises FullContextError and EndedError."""
        self._check_open()
        if self.tree.nodes:
            self._check_limit()
        parent = self.tree.longest_prefix(ids, role)
        if self._is_encoded_again(parent, ids, role):
            self.counts["retokenised"] += 1
        if parent is None and any(node.role == role for node in self.tree.nodes):
            self.tree.branch_reasons["edited"] += 1
        elif parent is not None and parent.num_children:
            self.tree.branch_reasons["retry"] += 1
        node = await self._sample(_Prompt(parent, list(ids), ""), params, request=None, role=role)
        self.tree.commit(node)
        return _reply(node, {"role": "assistant", "content": node.completion.text})

    def _is_encoded_again(self, parent: TreeNode | None, ids: Sequence[int], role: str) -> bool:
        """Return whether the text of `ids` continues the role's latest answer, and the ids do not."""
        latest = next((node for node in reversed(self.tree.nodes) if node.role == role), None)
        if latest is None or latest is parent:
            return False
        return self.chat_format.decode(list(ids)).startswith(self.chat_format.decode(latest.ids()))

    async def count_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Return the number of prompt tokens that `chat` would have."""
        _, prompt = await self._read(messages, tools, template_kwargs, "")
        return len(prompt.ids)

    def end(self, reason: str = "its episode is over") -> None:
        """Refuse further requests. The first reason counts."""
        self.end_reason = self.end_reason or reason
        self._limit = str
        self._complete = _refuse  # what completed refers to the session: neither then needs a garbage collection

    def _check_open(self) -> None:
        if self.end_reason:
            raise EndedError(f"session {self.name} has ended: {self.end_reason}; open another one for a new episode")

    def _check_limit(self) -> None:
        if limit := self._limit():
            self.counts["limited"] += 1
            raise LimitReachedError(f"the episode reached its limit of {limit}; end it, there are no more answers")

    # -- prompts -----------------------------------------------------------------------------------------------

    async def _read(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        role: str,
    ) -> tuple[ChatRequest, _Prompt]:
        """Find where messages attach, and what the engine reads. Large ones are counted and rendered in a thread."""
        await self._check_template()
        values = list(messages), tools
        size = await asyncio.to_thread(num_chars, *values) if len(messages) > FEW else num_chars(*values)
        self.check_num_chars(size)
        checked = checked_messages(messages if isinstance(messages, CheckedMessages) else list(messages))
        kwargs = dict(template_kwargs or {})
        root = canonical([sorted(map(canonical, tools or ())), kwargs, role])  # clients may reorder the tools
        request = self.tree.request(checked, root)
        candidates = list(self.tree.candidates(request))
        if size <= SMALL:
            return request, self._prompt_after(candidates, request, tools, kwargs)
        return request, await asyncio.to_thread(self._prompt_after, candidates, request, tools, kwargs)

    def check_num_chars(self, size: int) -> None:
        """Raise FullContextError if this many characters of messages and tools cannot fit into the context."""
        longest = self.chat_format.longest_token
        if self.context_len is not None and size > self.context_len * longest:
            self.counts["full_contexts"] += 1
            raise FullContextError(
                f"the messages and tools have {size} characters, which cannot fit: the context length is "
                f"{self.context_len} tokens and a token has at most {longest} characters; end the episode, or shorten "
                "the messages"
            )

    async def _check_template(self) -> None:
        if self.chat_format.is_proven:
            return
        await asyncio.to_thread(lambda: self.chat_format.longest_token)
        proof = await asyncio.to_thread(self.chat_format.proof)
        for (has_tools, role), reason in proof.reasons.items():
            logger.warning(
                "the chat template cannot be extended by a %s message %s tools: %s; such requests are compared with "
                "the whole rendered conversation, and what differs is a branch",
                role, "with" if has_tools else "without", reason,
            )  # fmt: skip

    def _prompt_after(
        self,
        candidates: Sequence[TreeNode],
        request: ChatRequest,
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> _Prompt:
        proof = self.chat_format.proof()
        if self.settings.history == "keep":
            for node in candidates:
                new = request.messages[node.num_messages :]
                if not proof.problem(new, has_tools=bool(tools)):
                    with contextlib.suppress(RewrittenError):  # this answer's calls, for example: all is rendered
                        return self._appended(node, request, tools, kwargs)
        text = self.chat_format.render(request.messages, tools=tools, kwargs=kwargs)
        self.chat_format.check_written(text, request.messages, request.messages, tools=tools, kwargs=kwargs)
        if self.settings.history == "template":
            for i, node in enumerate(candidates):
                known = "".join(self.chat_format.decode(part) for n in node.path for part in (n.added, n.sampled))
                if text.startswith(known):
                    rest = text[len(known) :]
                    return _Prompt(node, [*node.ids(), *self.chat_format.encode(rest)], rest, is_rewritten=i > 0)
        ids = self.chat_format.encode(text)
        for i, node in enumerate(candidates):
            if ids[: node.num_ids] == node.ids():
                return _Prompt(node, ids, text, is_rewritten=i > 0)
        return _Prompt(None, ids, text, is_rewritten=bool(candidates))

    def _appended(
        self, node: TreeNode, request: ChatRequest, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]
    ) -> _Prompt:
        assert node.reply is not None
        new = request.messages[node.num_messages :]
        last = self.chat_format.decode(node.sampled[-1:]) if self._has_end(node) else ""
        text = self.chat_format.appended(node.reply, last, new, tools=tools, kwargs=kwargs)
        self.chat_format.check_written(text, request.messages, new, tools=tools, kwargs=kwargs)
        return _Prompt(node, [*node.ids(), *self.chat_format.encode(text)], text)

    def _has_end(self, node: TreeNode) -> bool:
        is_stopped = node.completion.finish_reason == "stop" and bool(node.sampled)
        return is_stopped and node.sampled[-1] in self.chat_format.end_ids

    # -- answers -----------------------------------------------------------------------------------------------

    async def _sample(
        self,
        prompt: _Prompt,
        params: SamplingParams | None,
        *,
        request: ChatRequest | None,
        role: str,
        stream: ReplyStream | None = None,
        has_tools: bool = False,
    ) -> TreeNode:
        """Call the engine. The node is not yet part of the tree. Raises FullContextError and EndedError."""
        params = params or self.params
        if self.context_len is not None and len(prompt.ids) >= self.context_len:
            self.counts["full_contexts"] += 1
            raise FullContextError(
                f"the prompt has {len(prompt.ids)} tokens, but the context length is {self.context_len}; end the "
                "episode, shorten the messages, or raise --rollout-max-context-len if the model supports it"
            )
        if self.context_len is not None:
            room = self.context_len - len(prompt.ids)
            limits = min(params.max_new_tokens, room), min(params.min_new_tokens, room)
            params = replace(params, max_new_tokens=limits[0], min_new_tokens=limits[1])
        part = self._part(prompt)
        started = time.monotonic()
        response_id, self._num_asked = f"{self.name}-{self._num_asked}", self._num_asked + 1
        if stream is None:
            completion = await self._complete(prompt.ids, params, part)
        else:
            deltas = TextDeltas(  # the text that `_parse` reads
                self.chat_format.tokenizer,
                skip_special_tokens=False,
                end_ids=self.chat_format.end_ids,
                stops=params.stop,
                held_chars=max((len(stop) - 1 for stop in params.stop), default=0),
            )
            growing = GrowingReply(self.parser, has_tools=has_tools, opened=prompt.is_opened)

            def parts(tokens: list[int]) -> tuple[str, str]:
                return growing.feed(deltas.delta(tokens))

            stream.begin(response_id, len(prompt.ids), parts=parts, decode=self.chat_format.decode)
            tokens = [] if params.json_schema is not None else [stream.tokens]  # it may be sampled again from the start
            completion = await self._complete(prompt.ids, params, part, *tokens)
        self._check_open()
        if not completion.tokens:
            self._check_limit()
        start = 0 if prompt.parent is None else prompt.parent.num_ids
        num_before = 0 if request is None or prompt.parent is None else prompt.parent.num_messages
        number = len(self.tree.nodes)
        return TreeNode(
            prompt.parent,
            number,
            prompt.ids[start:],
            completion,
            messages=() if request is None else tuple(request.messages[num_before:]),
            params=params,
            role=role,
            seconds=time.monotonic() - started,
            response_id=response_id,
            is_cut=stream is not None and stream.tokens.is_stopped and completion.finish_reason == "abort",
            num_messages=0 if request is None else len(request.messages) + 1,
            is_branch=part is not None,
            prompt_hash=hash_of(prompt.ids),
        )

    def _part(self, prompt: _Prompt) -> int | None:
        """Return what selects the random numbers of a call: None along the first conversation, else from its prompt.

        So the draws of branches do not depend on the order in which concurrent requests arrive.
        """
        parent = -1 if prompt.parent is None else prompt.parent.number
        is_first = not self._started[parent] and (prompt.parent is None or not prompt.parent.is_branch)
        self._started[parent] += 1
        digest = int(hash_of(prompt.ids)[:15], 16)
        same = self._asked[digest]
        self._asked[digest] += 1
        return None if is_first else MAX_CALLS + digest + same

    def _parse(
        self, node: TreeNode, prompt: _Prompt, tools: list[dict[str, Any]] | None, json_reply: JsonReply | None
    ) -> ParsedReply:
        text = self.chat_format.decode(node.sampled[:-1] if self._has_end(node) else node.sampled)
        ends = [at for stop in node.params.stop if (at := text.find(stop)) >= 0]
        text = text[: min(ends)] if ends else text
        if json_reply is None:
            parsed = parse_reply(text, tools or (), self.parser, opened=prompt.is_opened)
        else:
            parsed = json_reply.parse(text)
        self.counts["ill_formed_calls"] += parsed.num_ill_formed
        return parsed

    def _message(self, parsed: ParsedReply, calls: Sequence[Any], response_id: str) -> Message:
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {
                    "id": _call_id(f"{response_id}-{i}"),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(calls)
            ]
        return message


async def _refuse(*_: Any) -> Completion:
    raise EndedError("the session ended before the engine was asked")


def _reply(node: TreeNode, message: Message) -> Reply:
    done = node.completion
    num_prompt = node.num_ids - len(done.tokens)
    return Reply(
        message,
        done.tokens,
        done.log_probs,
        done.versions,
        done.finish_reason,
        num_prompt,
        done.cached_tokens,
        node.response_id,
        node,
    )


def _call_id(seed: str) -> str:
    """Return an id of nine letters and digits, the only form that Mistral's templates accept."""
    number = xxhash.xxh3_64_intdigest(seed.encode())
    return "".join(_ID_CHARS[number // 36**i % 36] for i in range(9))
