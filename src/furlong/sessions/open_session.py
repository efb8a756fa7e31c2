"""`OpenSession`: a session that clients can reach, and the answers to their calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from furlong.chat.messages import Message
from furlong.inference.request_error import RequestError
from furlong.inference.server.fields import quote
from furlong.inference.server.generate_api import sampling_params
from furlong.interfaces import SamplingParams
from furlong.sessions.endpoints.answered_call import AnsweredCall
from furlong.sessions.endpoints.client_call import ClientCall
from furlong.sessions.reply import Reply
from furlong.sessions.reply_stream import ReplyStream
from furlong.sessions.role_names import check_role
from furlong.sessions.session import Session

MAX_ANSWERED = 64  # replies of a session that are kept for retries
SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # of the run, unless clients may set them

Abort = Callable[[], Awaitable[None]]


@dataclass
class OpenSession:
    """A session that clients can reach. `url` is the base URL without /v1; `key` an API key of this session only.

    client_sampling: clients set temperature, top_p, top_k and min_p; otherwise those of the run apply. `result` is what
    a client posted at its end: `reward`, `metadata` and `error`, None for what it left out.
    """

    id: str
    url: str
    key: str
    session: Session = field(repr=False)
    abort: Abort = field(repr=False)
    client_sampling: bool = False
    requests: OrderedDict[str, AnsweredCall] = field(default_factory=OrderedDict[str, AnsweredCall], repr=False)
    result: dict[str, Any] | None = None

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

    @property
    def context_len(self) -> int | None:
        """The most tokens of prompt and answer; None for no limit."""
        return self.session.context_len

    async def check_size(self, body: Mapping[str, Any]) -> None:
        """Count the characters of a large body. Raises FullContextError if it cannot fit into the context."""
        await self.session.checked_size(body, is_large=True)

    def call(self, call: ClientCall, *, role: str, key: str, is_retry: bool) -> AnsweredCall:
        """Start a call, or return the one with this key that a client's retry repeats."""
        known = self.requests.get(key)
        if known is None or (known.task.done() and known.is_delivered and not is_retry) or known.is_over:
            known = AnsweredCall(lambda streams: self._replies(call, role, streams), call)
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
        is_plain = not (call.wants_prompt_ids or call.wants_texts)
        return replies if is_plain else [self._completed(call, reply) for reply in replies]

    async def _reply(self, call: ClientCall, params: SamplingParams, role: str, stream: ReplyStream | None) -> Reply:
        if call.ids is not None:
            ids = self.session.chat_format.encode(call.ids) if isinstance(call.ids, str) else call.ids
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
    those that differ. Raises RequestError for values of the wrong type.
    """
    run = session.params
    for name in call.overridden:
        session.counts[f"overridden_{name}"] += 1
    sent = {key: value for key, value in call.sampling.items() if value is not None}
    if not sent and call.max_tokens is None:
        return run
    wanted = sampling_params(sent)
    limit = run.max_new_tokens if call.max_tokens is None else min(call.max_tokens, run.max_new_tokens)
    changes: dict[str, Any] = {
        "max_new_tokens": limit,
        "min_new_tokens": min(max(run.min_new_tokens, wanted.min_new_tokens), limit),
        "stop": (*run.stop, *wanted.stop),
        "stop_token_ids": (*run.stop_token_ids, *wanted.stop_token_ids),
    }
    for name in SAMPLING:
        if call.sampling.get(name) is not None and getattr(wanted, name) != getattr(run, name):
            if client_sampling:
                changes[name] = getattr(wanted, name)
            else:
                session.counts[f"overridden_{name}"] += 1
    if (seed := wanted.sampling_seed) is not None:
        if run.sampling_seed is None:
            changes["sampling_seed"] = seed
        else:
            session.counts["overridden_seed"] += 1
    return dataclasses.replace(run, **changes)
