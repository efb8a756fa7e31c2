"""Adapters between agents that speak HTTP and the policy: `slime.agent.adapters` and `slime.agent.aiohttp_threaded`.

An adapter serves the sessions of samples at an address that the generate function chooses, with the function's session
ids as API keys. One server answers Anthropic's and OpenAI's requests, so both adapters are the same. Sampling
parameters, weight versions and samples are those of sessions: a client cannot set the temperature, and every sampled
token is trained on exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from furlong.chat.parsers import PARSERS
from furlong.core.addresses import host_and_port
from furlong.core.sample import Sample
from furlong.errors import RolloutError
from furlong.rollout.agent import policy
from furlong.sessions.open_session import OpenSession
from furlong.sessions.samples import samples_from_session
from furlong.sessions.session import LimitReachedError
from furlong.sessions.session_server import SessionServer

PARSER_NAMES = {  # SGLang's names of tool parsers that have another one here
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "deepseekv3": "deepseek",
    "glm": "glm45",
}
WAIT_S = 5.0  # for requests in flight when a session is finished

logger = logging.getLogger(__name__)


class AdapterServer(SessionServer):
    """The sessions of one adapter. Clients may give any model name; `max_turns` bounds the answers of a session."""

    def __init__(self, host: str, port: int, max_turns: int | None) -> None:
        super().__init__(host=host, port=port)
        self._max_turns, self._num_turns = max_turns, Counter[str]()

    async def start(self) -> None:
        """Start what answers requests, which clients may send before the first session."""
        self.loop = asyncio.get_running_loop()
        self.http.start()

    def admit(self, opened: OpenSession) -> None:
        """Raise LimitReachedError for a session that had all its answers."""
        if self._max_turns is not None and self._num_turns[opened.id] >= self._max_turns:
            raise LimitReachedError(f"the session had max_turns_per_sid={self._max_turns} answers; end the episode")
        self._num_turns[opened.id] += 1

    async def end(self, opened: OpenSession) -> None:
        """End a session."""
        del self._num_turns[opened.id]
        await super().end(opened)


@dataclass
class _OpenAdapterSession:
    opened: OpenSession
    max_tokens: int | None


class SessionAdapter:
    """`AnthropicAdapter` and `OpenAIAdapter`: pass `app` to `run_app_in_thread`, then open a session for each sample.

    tool_parser: SGLang's or furlong's name; None, or a name that furlong does not have, for the one that the chat
    template suggests. max_turns_per_sid: answers of a session; later requests get status 429. The other arguments have
    no effect: the run has the tokenizer and the engine, and a changed history is always a separate sample.
    Raises RolloutError for `debug_callback`.
    """

    def __init__(
        self,
        *,
        tokenizer: Any = None,
        sglang_url: Any = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Any = None,
    ) -> None:
        if debug_callback is not None:
            raise RolloutError(
                f"{type(self).__name__}: debug_callback is not supported; the conversations are in the metadata of the "
                "samples that finish_session returns (`messages`)"
            )
        self.tokenizer, self.sglang_url, self.reasoning_parser = tokenizer, sglang_url, reasoning_parser
        self.max_turns_per_sid, self.fork_threshold_tokens = max_turns_per_sid, fork_threshold_tokens
        self.tool_parser = tool_parser
        self._parser = None if tool_parser is None else PARSERS.get(PARSER_NAMES.get(tool_parser, tool_parser))
        if tool_parser is not None and self._parser is None:
            logger.warning(
                "%s: furlong has no tool parser %s (%s); calls are read by the one that the chat template suggests",
                type(self).__name__, tool_parser, ", ".join(PARSERS),
            )  # fmt: skip
        self.server: AdapterServer | None = None
        self._sessions: dict[str, _OpenAdapterSession] = {}

    @property
    def app(self) -> SessionAdapter:
        """What `run_app_in_thread` serves."""
        return self

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Let clients reach the session of the sample that the calling generate function got, with `sid` as API key.

        Sampling parameters are those of the run. Raises RolloutError for an id that is open, before
        `run_app_in_thread(adapter.app)`, and outside a generate function.
        """
        del sampling_defaults
        if self.server is None:
            raise RolloutError(f"session {sid!r}: the adapter is not served; call run_app_in_thread(adapter.app) first")
        if sid in self._sessions:
            raise RolloutError(f"session {sid!r} is open; give every sample an id that no other one has")
        current = policy()
        session = current.session_tree
        if max_context_tokens > 0:
            session.context_len = min(session.context_len or max_context_tokens, max_context_tokens)
        session.parser = self._parser or session.parser
        opened = self.server.open(session, lambda: current.engine.abort([current.session]), key=sid)
        self._sessions[sid] = _OpenAdapterSession(opened, max_context_tokens or None)

    async def shutdown_session(self, sid: str, *, wait_timeout: float = WAIT_S) -> None:
        """Refuse further requests of a session, wait for those in flight, and abort what is left."""
        entry = self._sessions.get(sid)
        if entry is None or self.server is None:
            return
        entry.opened.session.end()
        tasks = [each.task for each in entry.opened.requests.values() if not each.task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=wait_timeout)
        await self.server.end(entry.opened)

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = WAIT_S,
    ) -> list[Sample]:
        """End a session and return its samples, each with the whole reward; [] if the agent never got an answer.

        The first samples are those of earlier branches. A second call returns [].
        """
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        entry = self._sessions.pop(sid, None)
        if entry is None or not entry.opened.session.tree.nodes:
            return []
        samples = samples_from_session(entry.opened.session, base_sample)
        for sample in samples:
            sample.reward = reward
            sample.metadata = {**sample.metadata, **(extra_metadata or {})}
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = WAIT_S) -> None:
        """End a session without samples; nothing if it is finished."""
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        self._sessions.pop(sid, None)


class AnthropicAdapter(SessionAdapter):
    """The adapter for agents that speak Anthropic's API."""


class OpenAIAdapter(SessionAdapter):
    """The adapter for agents that speak OpenAI's API."""


@dataclass
class AppHandle:
    """Where an adapter is served."""

    host: str
    port: int
    adapter: SessionAdapter
    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[None]

    def stop(self) -> None:
        """Stop answering, on the event loop that serves."""
        server, self.adapter.server = self.adapter.server, None
        if server is not None and not self.loop.is_closed():
            asyncio.run_coroutine_threadsafe(server.close(), self.loop)


def run_app_in_thread(app: SessionAdapter, *, host: str = "127.0.0.1", port: int = 0, **options: Any) -> AppHandle:
    """Serve an adapter's `app` on the running event loop, without a thread. Port 0 chooses a free one.

    `options` have no effect. Raises RolloutError for another app, and outside a generate function; EngineError if the
    address cannot be bound.
    """
    del options
    if not isinstance(app, SessionAdapter):  # pyright: ignore[reportUnnecessaryIsInstance]  user code
        raise RolloutError(
            f"run_app_in_thread got {type(app).__name__}; pass the `app` of an adapter, and serve an application of "
            "aiohttp with aiohttp.web.AppRunner"
        )
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RolloutError("run_app_in_thread needs a running event loop; call it in a generate function") from None
    app.server = AdapterServer(host, port, app.max_turns_per_sid)
    bound_port = app.server.address[1]
    logger.info("the adapter of agents: http://%s", host_and_port(host, bound_port))
    return AppHandle(host, bound_port, app, loop, loop.create_task(app.server.start()))


class FilteredAccessLogger:
    """A name that `run_app_in_thread` accepts as an option: requests are not logged."""


def flatten_content(content: Any) -> str:
    """Return the text of a message's content, which may be a list of Anthropic's or OpenAI's blocks.

    Blocks are separated by newlines, and an image is replaced by a note.
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return str(content)
    texts = (_text_of_block(block) for block in cast("Sequence[Any]", content))
    return "\n".join(text for text in texts if text)


def _text_of_block(block: Any) -> str:
    if not isinstance(block, dict):
        return str(block)
    fields = cast("dict[str, Any]", block)
    kind = fields.get("type")
    if kind in ("image", "image_url", "input_image"):
        return "[image omitted]"
    if kind not in ("text", "input_text", "output_text") and "content" in fields:
        return flatten_content(fields["content"])
    return str(fields.get("text") or "")
