"""One trainer rank's part in a weight update: `RankSync` reads the rank's weights and passes them to a transport.

If the model is sharded, reading is collective: every rank iterates over the same names and gets each tensor whole. So a
rank whose transport failed still reads to the end, or the other ranks would wait for it forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from furlong.core.weights import EngineAddress, NamedTensor, WeightSource
from furlong.errors import SyncError
from furlong.weight_sync.daemon_threads import in_thread
from furlong.weight_sync.transports.transport import Connect, Transport
from furlong.weight_sync.verification import record_for
from furlong.weight_sync.weight_record import WeightRecord


class RankSync:
    """Sends the weights of one trainer rank, or its part of them. All ranks call `send_weights` at the same time.

    Args:
        weights: Returns the rank's weights. With several ranks, reading them is a collective operation.
        transport: Sends them.
        connect: Opens clients of the engine servers.
        rank: This rank. Rank 0 makes the record of what was sent.
        world_size: Number of trainer ranks.

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
        """The transport that sends the weights."""
        return self._transport

    async def send_weights(
        self, addresses: Sequence[EngineAddress], version: int, *, source: WeightSource | None = None
    ) -> WeightRecord:
        """Send the weights, or those of `source`; return the record of what was sent (complete on rank 0 only).

        Work queued on the device afterwards may change the weights. Raises SyncError.
        """
        opened: Iterator[NamedTensor] | None = None
        has_part = self._rank == 0 or self._transport.every_rank
        async with self._connect(addresses) as servers:
            sent = record_for(servers)
            weights = source or self._weights()
            if self._rank == 0:
                weights = sent.recording(weights)

            def opening() -> Iterator[NamedTensor]:
                nonlocal opened
                opened = iter(weights.open())
                return opened

            try:
                if has_part:
                    await self._transport.send(WeightSource(opening), servers, version, sent)
                else:
                    await in_thread(lambda: _read_all(iter(weights.open())))
            except BaseException:
                if self._world_size > 1 and has_part:  # the transport may have failed before it read anything
                    rest = iter(weights.open()) if opened is None else opened
                    await in_thread(lambda: _read_all(rest))
                raise
        assert sent.is_read or self._rank > 0  # transports read their source to the end
        sent.start()
        if self._rank == 0 and not sent.num_tensors:
            raise SyncError(f"weight_sync version {version}: the trainer has no tensors to send")
        return sent

    async def resend(self, addresses: Sequence[EngineAddress], version: int) -> bool:
        """Load `version` into these servers from the transport's stored copy; False if it has none."""
        async with self._connect(addresses) as servers:
            return await self._transport.resend(servers, version)

    async def close(self) -> None:
        """Release the transport's resources."""
        await self._transport.close(self._connect)


def _read_all(tensors: Iterator[NamedTensor]) -> None:
    for _ in tensors:
        pass
