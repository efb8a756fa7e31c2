"""The policy as an environment's `run` sees it in a worker process: its calls are answered by the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from furlong.errors import RolloutError

Ask = Callable[[str, Mapping[str, Any]], "Future[Any]"]
"""Sends the name and the arguments of a method of the policy."""


@dataclass(frozen=True)
class WorkerReply:
    """An answer of the policy, with the fields of `policy().chat`."""

    message: Mapping[str, Any]
    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    id: str

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
        """The calls in OpenAI's form."""
        return self.message.get("tool_calls", [])


@dataclass(frozen=True)
class WorkerCompletion:
    """A completion of token ids, with the fields of `policy().generate`."""

    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    text: str


@dataclass(frozen=True)
class WorkerSession:
    """The session of the episode on the session server, for clients that speak HTTP."""

    url: str
    key: str
    id: str


class WorkerPolicy:
    """The methods of the policy that work across processes: chat, role, generate, open_session, encode and decode."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> WorkerReply:
        """Answer chat messages, as `policy().chat`."""
        return WorkerReply(**await asyncio.wrap_future(self._ask("chat", {"messages": list(messages), **options})))

    def role(self, name: str, *, trainable: bool = True, group: str | None = None) -> WorkerRole:
        """Return the policy as one of several agents of the episode."""
        self._ask("role", {"name": name, "trainable": trainable, "group": group}).result()
        return WorkerRole(self, name)

    async def generate(self, prompt: str | Sequence[int], **sampling_params: Any) -> WorkerCompletion:
        """Complete text or token ids, as `policy().generate`."""
        values = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **sampling_params}
        return WorkerCompletion(**await asyncio.wrap_future(self._ask("generate", values)))

    def open_session(self) -> WorkerSession:
        """Return the session of this sample on the session server."""
        return WorkerSession(**self._ask("open_session", {}).result())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without adding special tokens."""
        return self._ask("encode", {"text": text}).result()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self._ask("decode", {"tokens": list(tokens)}).result()

    def __getattr__(self, name: str) -> Any:
        raise RolloutError(
            f"policy.{name} does not work in a process of --env-workers process; use chat, role, generate, "
            "open_session, encode or decode, or run this environment with --env-workers thread"
        )


@dataclass(frozen=True)
class WorkerRole:
    """The policy as the agent of one role."""

    policy: WorkerPolicy
    name: str

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> WorkerReply:
        """Answer chat messages."""
        return await self.policy.chat(messages, role=self.name, **options)
