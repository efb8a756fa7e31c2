"""Weight updates of engine servers: `RemoteSync` in the driver, and `RankSync` on each trainer rank.

An update takes four steps:
1. the live servers stop serving (`begin_loading`);
2. the trainer ranks send the weights, wherever they run;
3. the weights that the servers report are compared with what was sent;
4. the servers resume serving (`finish_loading`). A server that failed at any point does not.

With `verify_while_serving`, steps 3 and 4 are exchanged: servers generate while they hash their weights, and
`finish_verification` waits for the comparison. The loop calls it before it trains on anything, so nothing is learned
from unverified weights. A server that fails then stops serving, and the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from furlong.core.weights import EngineAddress, NamedTensor, SyncReport, WeightSource
from furlong.errors import (
    ENGINE_HANGS,
    ENGINE_UNANSWERED,
    EngineError,
    EngineTimeoutError,
    Loss,
    NoAnswerError,
    SyncError,
)
from furlong.inference.sglang.server import SglangServer
from furlong.interfaces import Trainer, WeightSync
from furlong.quantization.scheme import QuantizationScheme
from furlong.transfer.threads import in_thread
from furlong.weight_sync.transports.transport import Connect, Transport, late_fields
from furlong.weight_sync.verification import WeightVerifier, record_for
from furlong.weight_sync.weight_record import WeightRecord

logger = logging.getLogger(__name__)

Servers = Callable[[], Awaitable[Sequence[SglangServer]]]
WasLost = Callable[[Sequence[Any], Mapping[str, Loss]], Awaitable[bool]]  # (servers, losses of silent ones by URL)

HANG = Loss("it hangs: no answer in time during a weight update", ENGINE_HANGS)
TIMEOUT_S = 1800.0  # for a whole update; transports have their own limit for each bucket


class WeightSender(Protocol):
    """The trainer ranks: a `RankSync` in this process, or one in every Ray worker."""

    async def send_weights(self, addresses: Sequence[EngineAddress], version: int) -> WeightRecord:
        """Call `RankSync.send_weights` on all ranks at the same time; return rank 0's record."""
        ...

    async def resend(self, addresses: Sequence[EngineAddress], version: int) -> bool:
        """Call `RankSync.resend` on rank 0."""
        ...

    async def close_sync(self) -> None:
        """Call `RankSync.close_sync` on all ranks."""
        ...


class RemoteSync(WeightSync):
    """Sends weights from trainer ranks to engine servers and verifies them.

    Args:
        sender: The trainer ranks.
        servers: Returns the servers in use.
        name: The transport, for messages.
        timeout_s: For one update.
        verify_while_serving: Whether servers generate while their weights are verified.
        was_lost: Returns whether any of these servers died during an update, which is then repeated without it. None:
            the update fails if a server dies.
    """

    def __init__(
        self,
        sender: WeightSender,
        servers: Servers,
        *,
        name: str,
        timeout_s: float = TIMEOUT_S,
        verify_while_serving: bool = False,
        was_lost: WasLost | None = None,
    ) -> None:
        self._sender, self._servers, self._was_lost = sender, servers, was_lost
        self._name, self._timeout_s, self._verify_while_serving = name, timeout_s, verify_while_serving
        self._verifying: tuple[Sequence[SglangServer], WeightRecord, int, asyncio.Task[str]] | None = None
        self._verifier = WeightVerifier()
        self._lock = asyncio.Lock()
        self._last_sent: tuple[int, WeightRecord] | None = None
        self._level = logging.INFO

    async def update_weights(self, version: int) -> SyncReport:
        """Send, load and verify the trainer's weights. Raises SyncError naming every engine that failed."""
        await self.finish_verification()
        async with self._lock:
            while True:
                servers = await self._servers()
                try:
                    report, sent = await self._update(
                        servers, version, self._sender.send_weights, while_serving=self._verify_while_serving
                    )
                except (SyncError, EngineError) as error:
                    if self._was_lost is None or not await self._was_lost(servers, _unanswered(error)):
                        raise
                    logger.warning(
                        "weight_sync version %d: an engine died during the weight update; retrying: %s", version, error
                    )
                    continue
                self._last_sent = version, sent
                return report

    async def finish_verification(self) -> dict[str, str]:
        """Wait for the verification of the previous update; return its checksums, {} if none is running.

        Raises SyncError if it fails; the servers have then stopped serving.
        """
        verifying, self._verifying = self._verifying, None
        if verifying is None:
            return {}
        servers, sent, version, task = verifying
        while True:
            try:
                compared = await task
                break
            except (SyncError, EngineError) as error:
                lost = self._was_lost
                alive = [each for each in servers if lost is None or not await lost([each], _unanswered(error))]
                if len(alive) == len(servers):
                    for server in servers:
                        server.begin_loading(version)
                    raise
                logger.warning("weight_sync version %d: an engine died before it was verified: %s", version, error)
                servers, task = alive, asyncio.create_task(self._verifier.check(alive, sent, version))
        logger.info("weight_sync verified: version %d, %s", version, compared or "no engine with it is left")
        return sent.checksums

    async def load_into(self, server: SglangServer, version: int) -> SyncReport | None:
        """Load the latest weights into one server that was restarted.

        Returns None if the transport had stored them, in which case only the version label is compared. Raises
        SyncError if `version` is not the latest, or the trainer has changed its weights since; the server must then
        wait for the next update.
        """
        async with self._lock:
            if self._last_sent is None or self._last_sent[0] != version:
                last = None if self._last_sent is None else self._last_sent[0]
                raise SyncError(f"{server.url} cannot load weight version {version}: the latest is {last}")
            server.begin_loading(version)
            if await self._sender.resend([server.address], version):
                label = await server.served_version()
                if label != str(version):
                    raise SyncError(f"{server.url} was sent weight version {version}, but reports {label!r}")
                server.finish_loading(version)
                return None
            before = self._last_sent[1]
            report, _ = await self._update([server], version, self._sender.send_weights, before=before)
            return report

    async def close(self) -> None:
        """Release process groups, folders and buffers."""
        verifying, self._verifying = self._verifying, None
        if verifying is not None:  # the run failed for another reason
            verifying[-1].cancel()
            await asyncio.gather(verifying[-1], return_exceptions=True)
        await self._sender.close_sync()

    async def _update(
        self,
        servers: Sequence[SglangServer],
        version: int,
        send: Callable[[Sequence[EngineAddress], int], Awaitable[WeightRecord]],
        *,
        before: WeightRecord | None = None,
        while_serving: bool = False,
    ) -> tuple[SyncReport, WeightRecord]:
        started = time.perf_counter()
        logger.log(self._level, "weight_sync start: version %d to %d engines by %s", version, len(servers), self._name)
        for server in servers:
            server.begin_loading(version)
        try:
            async with asyncio.timeout(self._timeout_s):
                sent = await send([server.address for server in servers], version)
        except TimeoutError as error:
            raise SyncError(
                f"weight_sync version {version} by {self._name} did not finish within {self._timeout_s:g} s; engines: "
                f"{', '.join(server.url for server in servers)}. A trainer rank or an engine hangs: see their logs",
                late=late_fields(version, self._timeout_s, [], transport=self._name),
            ) from error
        if before is not None:
            await in_thread(lambda: (before.finish(), sent.finish()))
            if sent.digest != before.digest:
                raise SyncError(
                    f"the trainer's weights are no longer version {version}; {servers[0].url} gets its weights with "
                    "the next update"
                )
        sent_at = time.perf_counter()
        task = asyncio.create_task(self._verifier.check(servers, sent, version))
        if while_serving:
            self._verifying = servers, sent, version, task
        compared = "not yet verified" if while_serving else await task
        for server in servers:
            server.finish_loading(version)
        verify_s = sent.verify_s + time.perf_counter() - sent_at
        seconds = time.perf_counter() - started
        wire = "" if sent.wire_bytes is None else f" ({sent.wire_bytes} sent)"
        logger.log(
            self._level,
            "weight_sync done: version %d, %d tensors, %d bytes%s, %.3f s, %s",
            version, sent.num_tensors, sent.num_bytes, wire, seconds, compared,
        )  # fmt: skip
        self._level = logging.DEBUG  # events.jsonl has every update
        checksums = {} if while_serving else sent.checksums
        report = SyncReport(version, sent.num_tensors, sent.num_bytes, seconds, verify_s, checksums, sent.wire_bytes)
        return report, sent


def _unanswered(error: SyncError | EngineError) -> dict[str, Loss]:
    """Return why engines that did not answer count as lost, by URL; {} if a trainer rank may be the cause."""
    if isinstance(error, EngineTimeoutError):
        return {error.url: HANG}
    broken = {error.url: str(error)} if isinstance(error, NoAnswerError) else {}
    silent: Sequence[str] = ()
    if isinstance(error, SyncError):
        broken, silent = error.broken, error.late["missing"] if error.late else ()
    losses = {
        url: Loss(f"it gave no answer during a weight update: {text}", ENGINE_UNANSWERED)
        for url, text in broken.items()
    }
    return dict.fromkeys(silent, HANG) | losses


class RankSync:
    """Sends the weights of one trainer rank, or its part of them. All ranks call `send_weights` at the same time.

    If the model is sharded, reading is collective: every rank iterates over the same names and gets each tensor whole.
    So a rank whose transport failed still reads to the end, or the other ranks would wait for it forever.

    Args:
        weights: Returns the rank's weights. With several ranks, reading them is a collective operation.
        transport: Sends them.
        connect: Opens clients of the engine servers.
        rank: This rank. Rank 0 makes the record of what was sent.
        world_size: Number of trainer ranks.
        scheme: How the engines store quantized weights, if they do; every rank that sends quantizes whole tensors.

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
        scheme: QuantizationScheme | None = None,
    ) -> None:
        self._scheme = scheme
        self._weights, self._transport, self._connect = weights, transport, connect
        self._rank, self._world_size = rank, world_size

    async def send_weights(
        self, addresses: Sequence[EngineAddress], version: int, *, source: WeightSource | None = None
    ) -> WeightRecord:
        """Send the weights, or those of `source`; return the record of what was sent (complete on rank 0 only).

        Work queued on the device afterwards may change the weights. Raises SyncError.
        """
        opened: Iterator[NamedTensor] | None = None
        has_part = self._rank == 0 or self._transport.every_rank
        async with self._connect(addresses) as servers:
            scheme = self._scheme
            sent = record_for(servers, is_quantized=scheme is not None)
            weights = source or self._weights()
            if scheme is not None and has_part:
                weights = scheme.quantized(weights, with_shapes=self._transport.needs_shapes(servers))
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
                    await in_thread(lambda: deque(weights.open(), maxlen=0))
            except BaseException:
                if self._world_size > 1 and has_part:  # the transport may have failed before it read anything
                    rest = iter(weights.open()) if opened is None else opened
                    await in_thread(lambda: deque(rest, maxlen=0))
                raise
        assert sent.is_read or self._rank > 0  # transports read their source to the end
        if self._rank == 0 and not sent.num_tensors:
            raise SyncError(f"weight_sync version {version}: the trainer has no tensors to send")
        return sent

    async def resend(self, addresses: Sequence[EngineAddress], version: int) -> bool:
        """Load `version` into these servers from the transport's stored copy; False if it has none."""
        async with self._connect(addresses) as servers:
            return await self._transport.resend(servers, version)

    async def close_sync(self) -> None:
        """Release the transport's resources."""
        await self._transport.close(self._connect)


class LocalSync(RemoteSync):
    """`RemoteSync` for a trainer in this process, the only rank, with this process's clients.

    Args:
        trainer: Provides the weights.
        servers: Returns the servers in use.
        transport: Sends the weights.
        scheme: As in `RankSync`.
        options: As in `RemoteSync`.
    """

    def __init__(
        self,
        trainer: Trainer,
        servers: Servers,
        transport: Transport,
        *,
        scheme: QuantizationScheme | None = None,
        **options: Any,
    ) -> None:
        self._clients: dict[str, SglangServer] = {}
        self._rank = RankSync(trainer.weights, transport, connect=self._connect, scheme=scheme)

        async def registered() -> Sequence[SglangServer]:
            in_use = await servers()
            self._clients |= {server.url: server for server in in_use}
            return in_use

        super().__init__(self._rank, registered, name=transport.name, **options)

    async def load(self, source: WeightSource, version: int) -> dict[str, str]:
        """Load weights from any source into the servers; return the checksums of what was sent."""

        async def send(addresses: Sequence[EngineAddress], version: int) -> WeightRecord:
            return await self._rank.send_weights(addresses, version, source=source)

        report, sent = await self._update(await self._servers(), version, send)
        self._last_sent = version, sent
        return report.checksums

    async def load_into(self, server: SglangServer, version: int) -> SyncReport | None:
        """`RemoteSync.load_into`, also for a server that is not in use yet."""
        self._clients[server.url] = server
        return await super().load_into(server, version)

    @contextlib.asynccontextmanager
    async def _connect(self, addresses: Sequence[EngineAddress]) -> AsyncGenerator[Sequence[SglangServer]]:
        yield [self._clients[address.url] for address in addresses]
