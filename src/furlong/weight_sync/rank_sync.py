"""One trainer rank's part in a publication: `RankSync` reads its weights and hands them to a transport.

Reading is collective where the model is sharded: every rank runs through the same names, and has each tensor whole.
So a rank whose transport failed still reads to the end: the others would wait for it for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from furlong.core.weights import EngineAddress, NamedTensor, WeightSource
from furlong.errors import SyncError
from furlong.weight_sync.daemon_threads import in_thread
from furlong.weight_sync.sent_weights import Sent
from furlong.weight_sync.transports.transport import Connect, Transport
from furlong.weight_sync.verification import record_for


class RankSync:
    """Publishes the weights of one trainer rank, or its part of them; all ranks call `send_weights` at once.

    Args:
        weights: The rank's weights. With several ranks, reading them is a collective operation.
        transport: How they go.
        connect: Opens clients of the engines' servers.
        rank: This rank; rank 0 answers for all.
        world_size: Trainer ranks.

    A Ray worker makes one for its backend and runs `asyncio.run(rank_sync.send_weights(addresses, version))`.
    """

    def __init__(
        self,
        weights: Callable[[], WeightSource],
        transport: Transport,
        *,
        connect: Connect,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._weights, self._transport, self._connect = weights, transport, connect
        self._rank, self._world_size = rank, world_size

    @property
    def transport(self) -> Transport:
        """How weights go."""
        return self._transport

    async def send_weights(
        self, addresses: Sequence[EngineAddress], version: int, *, source: WeightSource | None = None
    ) -> Sent:
        """Send the weights, or those of another source; returns the record of what was sent, which rank 0's is.

        What is asked of the device afterwards may change the weights. Raises SyncError.
        """
        opened: Iterator[NamedTensor] | None = None
        has_part = self._rank == 0 or self._transport.every_rank
        async with self._connect(addresses) as servers:
            sent = record_for(servers)
            watched = source or self._weights()
            if self._rank == 0:
                watched = sent.watched(watched)

            def opening() -> Iterator[NamedTensor]:
                nonlocal opened
                opened = iter(watched.open())
                return opened

            try:
                if has_part:
                    await self._transport.send(WeightSource(opening), servers, version, sent)
                else:
                    await in_thread(lambda: _read(iter(watched.open())))
            except BaseException:
                if self._world_size > 1 and has_part:  # a transport may have failed before it read anything
                    rest = iter(watched.open()) if opened is None else opened
                    await in_thread(lambda: _read(rest))
                raise
        assert sent.is_read or self._rank > 0  # transports read their source to its end
        sent.start()
        if self._rank == 0 and not sent.num_tensors:
            raise SyncError(f"weight_sync version {version}: the trainer has no tensors to publish")
        return sent

    async def resend(self, addresses: Sequence[EngineAddress], version: int) -> bool:
        """Load what was published as `version` into these servers, if the transport keeps it."""
        async with self._connect(addresses) as servers:
            return await self._transport.resend(servers, version)

    async def close(self) -> None:
        """Release what the transport holds."""
        await self._transport.close(self._connect)


def _read(tensors: Iterator[NamedTensor]) -> None:
    for _ in tensors:
        pass
