"""`OpenSession`: a session that clients can reach, and the calls that they make. All of it on the run's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from furlong.chat.messages import Message
from furlong.core.text import random_key
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import quote
from furlong.interfaces import SamplingParams
from furlong.sessions.json_replies import JsonReply
from furlong.sessions.session import EndedError, Reply, ReplyPiece, ReplyStream, Session, check_role

MAX_ANSWERED = 64  # replies of a session that are kept for retries
SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # of the run, unless clients may set them
OF_TEXT = ("skip_special_tokens", "no_stop_trim")  # of an answer to token ids
ONLY_OF_CLIENTS = ("ignore_eos", "return_routed_experts")  # refused unless clients set the sampling parameters

Abort = Callable[[], Awaitable[None]]
StreamPart = tuple[int, ReplyPiece | Reply]
"""The number of an answer, and what it grew by, or at last the whole reply."""


@dataclass(frozen=True)
class ClientCall:
    """A request in any protocol. `messages` are in OpenAI's form; a request of token ids, or of plain text, has `ids`.

    sampling: sampling parameters that the client sent, under SGLang's names. reads_calls: tool calls are parsed.
    json_reply: the form that the reply must have.
    overridden: fields that constrain sampling in other ways; the policy samples freely, and the session counts them.
    ignored: fields and hosted tools without an effect here, which are counted, too.
    wants_texts: the text of each token. wants_prompt_ids: the ids that the engine read. request: in its schema.
    """

    messages: Sequence[Message] = ()
    ids: Sequence[int] | str | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    n: int = 1
    model: str | None = None
    is_stream: bool = False
    reads_calls: bool = True
    json_reply: JsonReply | None = None
    max_calls: int | None = None
    overridden: Sequence[str] = ()
    ignored: Sequence[str] = ()
    wants_texts: bool = False
    wants_prompt_ids: bool = False
    request: Any = None


class Call:
    """A call in flight or answered, whose replies several requests of a client may wait for or stream.

    streams: one for each streamed answer. The engine's call belongs to the session, and continues if a client without a
    stream disconnects.
    """

    def __init__(
        self, answer: Callable[[Sequence[ReplyStream | None]], Coroutine[Any, Any, list[Reply]]], call: ClientCall
    ) -> None:
        self._change = asyncio.Event()  # set by the next change, for all that wait
        self._num_readers = self._num_delivered = 0
        self.streams: list[ReplyStream] = []
        if call.is_stream:
            self.streams = [ReplyStream(self._notify, wants_texts=call.wants_texts) for _ in range(call.n)]
        self.task = asyncio.create_task(answer(self.streams or [None] * call.n))
        self.task.add_done_callback(lambda _: self._notify())

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    @property
    def is_delivered(self) -> bool:
        """Whether a client got the replies."""
        return self._num_delivered > 0

    @property
    def is_over(self) -> bool:
        """Whether a retry must start a new call: this one failed, or its client left during the stream."""
        is_failed = self.task.done() and (self.task.cancelled() or self.task.exception() is not None)
        return is_failed or any(stream.tokens.is_stopped for stream in self.streams)

    def _finished(self) -> list[Reply]:
        if self.task.cancelled():
            raise EndedError("the session ended while the request was running")
        return self.task.result()

    async def replies(self) -> list[Reply]:
        """Return the replies to one client. Raises the error of the call, and EndedError if the session ended."""
        try:
            await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if not self.task.cancelled():
                self._leave()
                raise
        replies = self._finished()
        self._deliver()
        return replies

    async def begun(self) -> None:
        """Wait for the first token; `stop_reading` must follow. Raises the error of the call if there is one before."""
        self._num_readers += 1
        try:
            while not self.task.done() and not any(stream.pieces for stream in self.streams):
                await self._change.wait()
            if self.task.done():
                self._finished()
        except BaseException:
            self.stop_reading(is_complete=False)
            raise

    async def grown(self, seen: list[int]) -> tuple[list[StreamPart], bool]:
        """Wait for more than the `seen` pieces of each answer, and count them there.

        Returns what is new, at last the replies, and whether these are the last parts.
        """
        while True:
            change, is_done, new = self._change, self.task.done(), list[StreamPart]()
            for index, stream in enumerate(self.streams):
                if pieces := stream.pieces[seen[index] :]:
                    seen[index] += len(pieces)
                    new.append((index, reduce(ReplyPiece.joined, pieces)))
            if new:
                return new, False
            if is_done:
                return list(enumerate(self._finished())), True
            await change.wait()

    def stop_reading(self, *, is_complete: bool) -> None:
        """Note that a client has all parts, or has left. Without any other reader, the answers then end there."""
        self._num_readers -= 1
        if is_complete:
            self._deliver()
        else:
            self._leave()

    def mark_undelivered(self) -> None:
        """Note that a client without a stream had left when its replies were sent."""
        self._num_delivered -= 1
        self._leave()

    def _deliver(self) -> None:
        self._num_delivered += 1
        if self._num_delivered == 1:
            self._mark()

    def _leave(self) -> None:
        """Note that a client has left without the replies; streams end unless another one reads or has them."""
        if self.is_delivered or self._num_readers:
            return
        for stream in self.streams:
            stream.stop()
        self.task.add_done_callback(lambda _: self._mark())

    def _mark(self) -> None:
        if self.task.cancelled() or self.task.exception() is not None:
            return
        for reply in self.task.result():
            if reply.node is not None:
                reply.node.is_delivered = self.is_delivered


@dataclass
class OpenSession:
    """A session that clients can reach. `url` is the base URL without /v1; `key` an API key of this session only.

    controller_key: sets the result of the episode; not for the agent. client_sampling: clients set temperature, top_p,
    top_k and min_p; otherwise those of the run apply. `result` is what the controller posted at the end: `reward`,
    `metadata` and `error`, None for what it left out. encode: text to ids; None for that of the chat format, which adds
    no special tokens. refusal: status and text of the last request that was refused.
    """

    id: str
    url: str
    key: str = field(repr=False)
    session: Session = field(repr=False)
    abort: Abort = field(repr=False)
    client_sampling: bool = False
    requests: OrderedDict[str, Call] = field(default_factory=OrderedDict[str, Call], repr=False)
    result: dict[str, Any] | None = None
    encode: Callable[[str], list[int]] | None = field(default=None, repr=False)
    controller_key: str = field(default_factory=lambda: random_key("ck"), repr=False)
    refusal: str = ""

    @property
    def url_with_key(self) -> str:
        """The base URL for clients that do not send the key: it contains it."""
        return f"{self.url}.{self.key}"

    def role(self, name: str, *, trainable: bool = True, group: str | None = None) -> RoleAddress:
        """Return the address of one of several agents of the episode, as `policy().role`.

        Raises RolloutError for a name with other characters than letters, digits, `_`, `-` and `.`.
        """
        check_role(name)
        if group is not None:
            check_role(group)
            self.session.role_groups[name] = group
        if not trainable:
            self.session.frozen_roles.add(name)
        return RoleAddress(name, f"{self.url}/roles/{name}", f"{self.key}:{name}")

    def call(self, call: ClientCall, *, role: str, key: str, is_retry: bool) -> Call:
        """Start a call, or return the one with this key that a client's retry repeats."""
        known = self.requests.get(key)
        if known is None or (known.task.done() and known.is_delivered and not is_retry) or known.is_over:
            known = Call(lambda streams: self._replies(call, role, streams), call)
            self.requests[key] = known
            while len(self.requests) > MAX_ANSWERED and next(iter(self.requests.values())).task.done():
                self.requests.popitem(last=False)
        else:
            self.session.counts["retries"] += 1
        return known

    async def count_tokens(self, call: ClientCall) -> int:
        """Return the number of prompt tokens that a call would have."""
        return await self.session.count_tokens(call.messages, tools=call.tools, template_kwargs=call.template_kwargs)

    async def earlier(self, response_id: Any) -> list[Message]:
        """Return the conversation of an earlier response, without its instructions. Raises RequestError."""
        node = next((n for n in self.session.tree.nodes if f"resp_{n.response_id}" == response_id), None)
        if node is None:
            raise RequestError(f"previous_response_id is {quote(response_id)}, which this session has not")
        messages = node.conversation()
        return messages[1:] if messages and messages[0]["role"] == "system" else messages

    async def _replies(self, call: ClientCall, role: str, streams: Sequence[ReplyStream | None]) -> list[Reply]:
        params = params_of(call, self.session, client_sampling=self.client_sampling)
        if call.n == 1:
            replies = [await self._reply(call, params, role, streams[0])]
        else:
            each = [params] * call.n
            if self.session.params.sampling_seed is None and params.sampling_seed is not None:
                each = [replace(params, sampling_seed=params.sampling_seed + i) for i in range(call.n)]
            works = [self._reply(call, own, role, stream) for own, stream in zip(each, streams, strict=True)]
            replies = list(await asyncio.gather(*works))
        if call.wants_texts or call.wants_prompt_ids:
            return [self._completed(call, reply) for reply in replies]
        return replies

    async def _reply(self, call: ClientCall, params: SamplingParams, role: str, stream: ReplyStream | None) -> Reply:
        if call.ids is not None:
            encode = self.encode or self.session.chat_format.encode
            ids = encode(call.ids) if isinstance(call.ids, str) else call.ids
            if not ids:
                raise RequestError("the prompt is empty; it needs at least one token")
            return await self.session.complete(ids, params=params, role=role)
        return await self.session.chat(
            call.messages,
            tools=call.tools,
            params=params,
            template_kwargs=call.template_kwargs,
            role=role,
            reads_calls=call.reads_calls,
            json_reply=call.json_reply,
            max_calls=call.max_calls,
            stream=stream,
        )

    def _completed(self, call: ClientCall, reply: Reply) -> Reply:
        """Add what few clients ask for."""
        texts: list[str] = []
        prompt: list[int] = []
        if call.wants_texts:
            texts = [self.session.chat_format.decode([token]) for token in reply.tokens]
        if call.wants_prompt_ids and reply.node is not None:
            prompt = reply.node.ids()[: reply.prompt_tokens]
        return replace(reply, texts=texts, prompt_ids=prompt)


@dataclass(frozen=True)
class RoleAddress:
    """Where the agent of a role reaches the policy. `url` is the base URL without /v1."""

    name: str
    url: str
    key: str = field(repr=False)


def params_of(call: ClientCall, session: Session, *, client_sampling: bool) -> SamplingParams:
    """Return the sampling parameters of a call: the run's, with the client's stops and a smaller limit of tokens.

    With `client_sampling` the client's temperature and so on replace those of the run; otherwise the session counts
    those that differ. Raises RequestError for parameters that only clients of `furlong serve` may set.
    """
    run = session.params
    session.counts["ignored_fields"] += len(call.ignored)
    for name in call.overridden:
        session.counts[f"overridden_{name}"] += 1
    sent = {key: value for key, value in call.sampling.items() if value is not None}
    if not sent and call.max_tokens is None:
        return run
    limit = run.max_new_tokens if call.max_tokens is None else min(call.max_tokens, run.max_new_tokens)
    changes: dict[str, Any] = {
        "max_new_tokens": limit,
        "min_new_tokens": min(max(run.min_new_tokens, sent.get("min_new_tokens", 0)), limit),
        "stop": (*run.stop, *sent.get("stop", ())),
        "stop_token_ids": (*run.stop_token_ids, *sent.get("stop_token_ids", ())),
        **{name: sent[name] for name in OF_TEXT if name in sent},
    }
    for name in (*SAMPLING, *ONLY_OF_CLIENTS):
        if name in sent and sent[name] != getattr(run, name):
            if client_sampling:
                changes[name] = sent[name]
            elif name in ONLY_OF_CLIENTS:
                raise RequestError(f"{name} is {sent[name]!r}, which is not supported here; remove it")
            else:
                session.counts[f"overridden_{name}"] += 1
    if (seed := sent.get("sampling_seed")) is not None:
        if run.sampling_seed is None:
            changes["sampling_seed"] = seed
        else:
            session.counts["overridden_seed"] += 1
    return dataclasses.replace(run, **changes)
