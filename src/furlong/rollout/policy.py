"""The policy that custom generate functions call: requests to the engine, with the sampling parameters of a sample."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from furlong.chat.messages import MessageError
from furlong.core.progress import progress
from furlong.core.routing import extend_routes
from furlong.core.sample import Sample
from furlong.core.token_stream import TokenStream
from furlong.core.tracing import heartbeat
from furlong.errors import RolloutError
from furlong.interfaces import Completion, Engine, Reward, SamplingParams
from furlong.rollout.episodes import EpisodeLoad, EpisodeWatch
from furlong.sessions.session import FullContextError, LimitReachedError, Reply, Session, check_role

if TYPE_CHECKING:  # imports a web server, which most runs do not need
    from furlong.sessions.open_session import OpenSession
    from furlong.sessions.session_server import SessionServer

MAX_FULL = 16  # calls with a full context
BRANCHES = 8  # latest calls of an episode that the next one may continue: of its roles, or of parallel conversations
SEED_OF_REST = 1 << 20  # seeds of continued requests begin here, beyond those of calls

_SEED_STRIDE = 0x9E3779B97F4A7C15  # golden ratio: the parts of one sample draw from separate streams
_PARAM_NAMES = frozenset(f.name for f in dataclasses.fields(SamplingParams)) - {"prefix_key"}


def params_from_dict(values: dict[str, Any]) -> SamplingParams:
    """Build sampling parameters from SGLang's names. Raises RolloutError for an unknown name."""
    if unknown := sorted(set(values) - _PARAM_NAMES):
        raise RolloutError(f"unknown sampling parameters {unknown}; known are {sorted(_PARAM_NAMES)}")
    fixed = dict(values)
    for name in ("stop", "stop_token_ids"):
        if name in fixed:
            value: Any = fixed[name]
            fixed[name] = () if value is None else (value,) if isinstance(value, str | int) else tuple(value)
    return SamplingParams(**fixed)


def dict_from_params(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as the dict that slime passes to custom generate functions.

    It is valid as `sampling_params` of an SGLang request, so it leaves out `return_routed_experts` and `prefix_key`,
    which `Policy` has.
    """
    values = dataclasses.asdict(params)
    del values["return_routed_experts"], values["prefix_key"]
    if params.json_schema is None:
        del values["json_schema"]
    values["stop"] = list(params.stop)
    values["stop_token_ids"] = list(params.stop_token_ids)
    return values


def seed_of_part(seed: int, part: int) -> int:
    """Return the seed of the n-th engine call of a sample; part 0 has the sample's seed."""
    return (seed + _SEED_STRIDE * part) % 2**63


@dataclass(eq=False)
class Policy:
    """The engine that serves the current weights, and its tokenizer.

    With `return_routed_experts` every call requests them. `context_len` limits prompt + completion. Requests that a
    weight update aborts are continued from their tokens while `continues()`. answered: the input ids and the completion
    of each call. full: prompt lengths that left no room. judge: scores the samples in the environment of the episode,
    which `closing` closes afterwards.
    """

    engine: Engine
    tokenizer: Any
    session: str
    return_routed_experts: bool = False
    context_len: int | None = None
    continues: Callable[[], bool] = lambda: False
    reward: Reward | None = field(default=None, repr=False)  # of the run, for functions that score samples themselves
    load: EpisodeLoad = field(default_factory=EpisodeLoad, repr=False)
    watch: EpisodeWatch = field(default_factory=EpisodeWatch, repr=False)
    conversation: Session | None = field(default=None, repr=False)  # of `chat`
    server: SessionServer | None = field(default=None, repr=False)
    calls: Iterator[int] = field(default_factory=itertools.count, repr=False)
    answered: list[tuple[list[int], Completion]] = field(default_factory=list[tuple[list[int], Completion]], repr=False)
    full: list[int] = field(default_factory=list[int], repr=False)
    opened: list[OpenSession] = field(default_factory=list["OpenSession"], repr=False)
    is_trained: bool = True  # on what it samples; not in evaluations
    judge: Callable[[Sequence[Sample]], Awaitable[None]] | None = field(default=None, repr=False)
    closing: AsyncExitStack = field(default_factory=AsyncExitStack, repr=False)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        role: str = "",
        **sampling_params: Any,
    ) -> Reply:
        """Answer chat messages in OpenAI's form; append the reply's `message` to continue the conversation.

        Earlier answers are not tokenized again: the engine continues the ids that it sampled. A generate function that
        returns its sample without a response gets the samples of these conversations. Parameters have SGLang's names
        and replace those of the run. If the context is full after at least one answer, the reply is empty with the
        finish reason "length". `role` is one of several agents of the episode. Raises MessageError for messages that
        the chat template rejects.
        """
        session = self.session_tree
        if role:
            check_role(role)
        params = None
        if sampling_params:
            params = params_from_dict({**dict_from_params(session.params), **sampling_params})
        try:
            return await session.chat(messages, tools=tools, template_kwargs=template_kwargs, params=params, role=role)
        except FullContextError:
            if not session.tree.nodes:
                raise
            done = await self._full_context([0] * (self.context_len or 0))
        except LimitReachedError:
            done = await self._full_context([])
        return Reply({"role": "assistant", "content": ""}, [], [], [], done.finish_reason, 0, 0, "")

    def role(self, name: str, *, trainable: bool = True, group: str | None = None) -> RolePolicy:
        """Return the policy as one of several agents of the episode.

        Its rewards are compared with those of the same role in other episodes; with `group`, with those of the roles of
        this episode that have the same one. Answers of a role that is not `trainable` are not trained on.
        Raises RolloutError for an unusable name.
        """
        check_role(name)
        if group is not None:
            check_role(group)
            self.session_tree.role_groups[name] = group
        if not trainable:
            self.session_tree.frozen_roles.add(name)
        return RolePolicy(self, name)

    def open_session(self) -> OpenSession:
        """Return the session of this sample on the session server. Raises RolloutError in a run without one."""
        if self.server is None:
            raise RolloutError(
                "this run has no session server; it is started with --custom-generate-function-path or an agent flag"
            )
        if not self.opened:
            engine, name = self.engine, self.session  # not `self`, which would be a reference cycle
            self.opened.append(self.server.open(self.session_tree, lambda: engine.abort([name])))
        return self.opened[0]

    async def end_session(self) -> None:
        """End the sample's conversations: later requests are refused, running ones are aborted."""
        if self.conversation is not None:
            limit = self.watch.reached
            self.conversation.end(f"its episode reached the limit of {limit}" if limit else "its episode is over")
        if self.server is not None:
            for opened in self.opened:
                await self.server.end(opened)

    @property
    def session_tree(self) -> Session:
        """The conversations of this sample. Raises RolloutError for a policy without a chat format."""
        if self.conversation is None:
            raise RolloutError("policy().chat needs a tokenizer with a chat template; see --chat-template-path")
        return self.conversation

    async def generate(self, prompt: str | Sequence[int], **sampling_params: Any) -> Completion:
        """Complete a prompt given as text or token ids. Parameters have SGLang's names.

        Each call of a sample has its own seed, derived from the number of the call, so that the turns of a conversation
        do not share random numbers. If the context is full after at least one completion, the result is empty with the
        finish reason "length": end the episode. Raises RolloutError if it is asked for more than `MAX_FULL` times.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if ids and isinstance(ids[0], Mapping):
            raise RolloutError(
                "policy().generate needs text or token ids, got chat messages; render them first: "
                "policy().tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)"
            )
        return await self.complete(ids, params_from_dict(sampling_params))

    async def complete(
        self, ids: list[int], params: SamplingParams, part: int | None = None, stream: TokenStream | None = None
    ) -> Completion:
        """Complete token ids, with the seed of this call, or that of `part`. `stream` gets the tokens meanwhile."""
        exact = self.engine.scored_temperatures
        if params.json_schema is not None and self.is_trained and exact and params.temperature not in exact:
            raise MessageError(
                f"structured output (tool_choice, response_format, json_schema) at temperature {params.temperature:g} "
                "has no exact log-probs with SGLang, which training needs; use --rollout-temperature 1 or --engine "
                "embedded"
            )
        params = dataclasses.replace(params, prefix_key=self.session)
        if self.return_routed_experts:
            params = dataclasses.replace(params, return_routed_experts=True)
        if self.context_len is not None and self.answered:
            room = self.context_len - len(ids)
            if room <= 0:
                return await self._full_context(ids)
            params = shortened(params, room)
        if self.watch.has_ended:
            return await self._full_context(ids)
        if self.watch.room is not None:
            params = shortened(params, self.watch.room)
        call = next(self.calls) if part is None else part
        if params.sampling_seed is not None:
            params = dataclasses.replace(params, sampling_seed=seed_of_part(params.sampling_seed, call))
        try:
            with self.watch.turn():
                async with asyncio.timeout(self.watch.limits.turn_timeout):
                    completion = await self._complete(ids, params, stream)
        except TimeoutError:
            self.watch.reached = "turn_time"
            return await self._full_context(ids)
        self.watch.sampled(len(completion.tokens))
        heartbeat.note("request")
        progress.advance(0, tokens=len(completion.tokens))
        self.answered.append((ids, completion))
        return completion

    async def _full_context(self, ids: list[int]) -> Completion:
        self.full.append(len(ids))
        if len(self.full) > MAX_FULL:
            raise RolloutError(
                f"policy().generate was called {len(self.full)} times with a full context ({len(ids)} tokens of "
                f"{self.context_len}) or after the limit of {self.watch.reached}; end the episode when finish_reason "
                "is 'length'"
            )
        await asyncio.sleep(0)  # a function that loops over calls must not stop the others
        return Completion([], [], [], "length")

    async def _complete(self, ids: list[int], params: SamplingParams, stream: TokenStream | None) -> Completion:
        whole = await self._request(ids, params, stream)
        while params.json_schema is not None and whole.finish_reason == "abort" and self.continues():
            whole = await self._request(ids, params, stream)  # an engine cannot continue in the middle of a schema
        while whole.finish_reason == "abort" and self.continues() and not (stream and stream.is_stopped):
            done = len(whole.tokens)
            if stream is not None:
                stream.begin_request(done)
            rest_params = shortened(
                dataclasses.replace(params, min_new_tokens=max(params.min_new_tokens - done, 0)),
                params.max_new_tokens - done,
            )
            if rest_params.max_new_tokens <= 0:
                return dataclasses.replace(whole, finish_reason="length")
            if params.sampling_seed is not None:
                seed = seed_of_part(params.sampling_seed, SEED_OF_REST + done)
                rest_params = dataclasses.replace(rest_params, sampling_seed=seed)
            rest = await self._request([*ids, *whole.tokens], rest_params, stream)
            whole = _joined(whole, rest)
        return whole

    async def _request(self, ids: list[int], params: SamplingParams, stream: TokenStream | None) -> Completion:
        done = await self.load.complete(self.engine, ids, params, session=self.session, stream=stream)
        if self.engine.caches_prefixes and done.versions:
            earlier = (
                len(prompt)
                for prompt, answer in self.answered[-BRANCHES:]
                if answer.versions and answer.versions[-1] == done.versions[0] and ids[: len(prompt)] == prompt
            )
            repeated = min(max(earlier, default=0), len(ids) - 1)  # the last token is computed for its logits
            self.load.prefixes(repeated, min(done.cached_tokens, repeated))
        return done

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without adding special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


@dataclass(frozen=True)
class RolePolicy:
    """The policy as the agent of one role."""

    policy: Policy
    name: str

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Reply:
        """Answer chat messages, with the options of `Policy.chat`."""
        return await self.policy.chat(messages, role=self.name, **options)


def shortened(params: SamplingParams, limit: int) -> SamplingParams:
    """Limit the number of new tokens to `limit`."""
    new, least = min(params.max_new_tokens, limit), min(params.min_new_tokens, limit)
    return dataclasses.replace(params, max_new_tokens=new, min_new_tokens=least)


def _joined(first: Completion, rest: Completion) -> Completion:
    return dataclasses.replace(
        rest,
        tokens=[*first.tokens, *rest.tokens],
        log_probs=[*first.log_probs, *rest.log_probs],
        versions=[*first.versions, *rest.versions],
        text=first.text + rest.text,
        cached_tokens=first.cached_tokens,
        latency_s=first.latency_s + rest.latency_s,
        routed_experts=extend_routes(first.routed_experts, rest.routed_experts),
    )
