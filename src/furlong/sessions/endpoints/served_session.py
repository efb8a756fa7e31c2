"""What the endpoints need of a session, whether it is in this process or in that of the run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from furlong.chat.messages import Message
from furlong.sessions.endpoints.client_call import ClientCall
from furlong.sessions.reply import Reply
from furlong.sessions.reply_stream import ReplyPiece

StreamPart = tuple[int, ReplyPiece | Reply]
"""The number of an answer, and what it grew by, or at last the whole reply."""


class StreamHead(Protocol):
    """What is known of a streamed answer before its first piece."""

    @property
    def response_id(self) -> str:
        """The name of the answer."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """The number of ids that the engine read."""
        ...


class RunningCall(Protocol):
    """A call of one client. It counts as delivered once it has its replies, unless `missed` follows."""

    @property
    def streams(self) -> Sequence[StreamHead]:
        """One for each streamed answer."""
        ...

    async def replies(self) -> list[Reply]:
        """Return the replies. Raises what the session raised, and EndedError if it ended meanwhile."""
        ...

    async def begun(self) -> None:
        """Wait for the first token. Raises the error of the call if there is one before."""
        ...

    def parts(self, deadline_s: float) -> AsyncGenerator[StreamPart]:
        """Yield what the answers grow by, and at the end the replies. Raises TimeoutError at the deadline.

        If the last reader leaves early, the engine's requests are aborted, and the answers end there.
        """
        ...

    def missed(self) -> None:
        """Note that the client was gone when its answer was ready."""
        ...


class ServedSession(Protocol):
    """A session as the endpoints see it."""

    @property
    def context_len(self) -> int | None:
        """The most tokens of prompt and answer; None for no limit."""
        ...

    async def check_size(self, body: Mapping[str, Any]) -> None:
        """Count the characters of a large body. Raises FullContextError if it cannot fit into the context."""
        ...

    def call(self, call: ClientCall, *, role: str, key: str, is_retry: bool) -> RunningCall:
        """Start a call, or join the one with this key that a client's retry repeats."""
        ...

    async def count_tokens(self, call: ClientCall) -> int:
        """Return the number of prompt tokens that a call would have."""
        ...

    async def earlier(self, response_id: Any) -> list[Message]:
        """Return the conversation of an earlier response, without its instructions. Raises RequestError."""
        ...
