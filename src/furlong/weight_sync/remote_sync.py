"""The driver's part in a publication: `RemoteSync` implements `interfaces.WeightSync` over engines outside this process.

One publication, in order: the live servers are taken out of use (`begin_loading`); the publisher, which is the trainer
ranks wherever they run, sends the weights; what the servers say they have is compared with what was sent; the servers
are put back into use (`finish_loading`). A server that failed anywhere stays out of use.

With the proof beside serving the last two change places: servers generate while they hash their weights, and `settle`
waits for the comparison. The loop settles before it trains on anything, so that nothing is learned from weights that
were not proven; a server that fails is out of use from then on, and the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from furlong.core.weights import EngineAddress, SyncReport, WeightSource
from furlong.errors import EngineError, EngineTimeoutError, NoAnswerError, SyncError
from furlong.interfaces import Trainer, WeightSync
from furlong.weight_sync.daemon_threads import in_thread
from furlong.weight_sync.rank_sync import RankSync
from furlong.weight_sync.sent_weights import Sent
from furlong.weight_sync.transports.transport import Transport
from furlong.weight_sync.verification import Proof
from furlong.weight_sync.weight_server import WeightServer, late

logger = logging.getLogger(__name__)

Servers = Callable[[], Awaitable[Sequence[WeightServer]]]
WasLost = Callable[[Sequence[Any], Mapping[str, str]], Awaitable[bool]]  # servers; why those of these URLs are lost

HANGS = "hangs: it did not answer in time while weights were published"
NO_ANSWER = "gave no answer while weights were published"
TIMEOUT_S = 1800.0  # of a whole publication; transports have limits of their own for each bucket


@runtime_checkable
class WeightSender(Protocol):
    """The trainer ranks. `cluster` implements it by `RankSync` in every worker, returning rank 0's answer."""

    async def send_weights(self, addresses: Sequence[EngineAddress], version: int) -> Sent:
        """Call `RankSync.send_weights` on all ranks at once."""
        ...

    async def resend(self, addresses: Sequence[EngineAddress], version: int) -> bool:
        """Call `RankSync.resend` on rank 0."""
        ...

    async def close_sync(self) -> None:
        """Call `RankSync.close` on all ranks."""
        ...


class RemoteSync(WeightSync):
    """Implements `interfaces.WeightSync` over trainer ranks and servers, neither of which need to be in this process.

    Args:
        sender: The trainer ranks.
        servers: Gives the engines that are in use.
        name: Of the transport, for messages.
        timeout_s: Of one publication.
        proves_beside: Whether servers serve while it is verified what they have.
        was_lost: Returns whether any of these servers died during a weight update, which is then repeated without it.
            None: an update during which a server dies fails.
    """

    def __init__(
        self,
        sender: WeightSender,
        servers: Servers,
        *,
        name: str,
        timeout_s: float = TIMEOUT_S,
        proves_beside: bool = False,
        was_lost: WasLost | None = None,
    ) -> None:
        self._sender, self._servers, self._was_lost = sender, servers, was_lost
        self._name, self._timeout_s, self._proves_beside = name, timeout_s, proves_beside
        self._unsettled: tuple[Sequence[WeightServer], Sent, int, asyncio.Task[str]] | None = None
        self._proof = Proof()
        self._lock = asyncio.Lock()
        self._published: tuple[int, Sent] | None = None

    async def update_weights(self, version: int) -> SyncReport:
        """Send, load and verify the trainer's weights. Raises SyncError naming every engine that failed."""
        await self.finish_verification()
        async with self._lock:
            while True:
                servers = await self._servers()
                try:
                    report, sent = await self._update(
                        servers, version, self._sender.send_weights, beside=self._proves_beside
                    )
                except (SyncError, EngineError) as error:
                    if self._was_lost is None or not await self._was_lost(servers, _unanswered(error)):
                        raise
                    logger.warning("weight_sync version %d: an engine died of or in it; again: %s", version, error)
                    continue
                self._published = version, sent
                return report

    async def finish_verification(self) -> dict[str, str]:
        """Wait for the proof of the publication before; returns its checksums, {} if there is nothing to wait for.

        Raises SyncError if it failed: its servers serve no more.
        """
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None:
            return {}
        servers, sent, version, proof = unsettled
        while True:
            try:
                compared = await proof
                break
            except (SyncError, EngineError) as error:
                lost = self._was_lost
                alive = [each for each in servers if lost is None or not await lost([each], _unanswered(error))]
                if len(alive) == len(servers):
                    for server in servers:
                        server.begin_loading(version)
                    raise
                logger.warning("weight_sync version %d: an engine died before it was verified: %s", version, error)
                servers, proof = alive, asyncio.create_task(self._proof.check(alive, sent, version))
        logger.info("weight_sync proven: version %d, %s", version, compared or "no engine is left that has it")
        return sent.own

    async def load_into(self, server: WeightServer, version: int) -> SyncReport | None:
        """Load the weights published last into one server that lacks them: one that was started again.

        Returns None if they were kept on disk and were loaded from there, with only the label compared. Raises
        SyncError if `version` is not the one published last, or the trainer has trained on since: the server then gets
        its weights with the next publication.
        """
        async with self._lock:
            if self._published is None or self._published[0] != version:
                last = None if self._published is None else self._published[0]
                raise SyncError(f"{server.url} cannot get weight version {version}: the one published last is {last}")
            server.begin_loading(version)
            if await self._sender.resend([server.address], version):
                label = await server.served_version()
                if label != str(version):
                    raise SyncError(f"{server.url} was given weight version {version}, but says it serves {label!r}")
                server.finish_loading(version)
                return None
            before = self._published[1]
            report, _ = await self._update([server], version, self._sender.send_weights, before=before)
            return report

    async def close(self) -> None:
        """Release groups, folders and buffers."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:  # the run failed of something else
            unsettled[-1].cancel()
            await asyncio.gather(unsettled[-1], return_exceptions=True)
        await self._sender.close_sync()

    async def _update(
        self,
        servers: Sequence[WeightServer],
        version: int,
        send: Callable[[Sequence[EngineAddress], int], Awaitable[Sent]],
        *,
        before: Sent | None = None,
        beside: bool = False,
    ) -> tuple[SyncReport, Sent]:
        started = time.perf_counter()
        logger.info("weight_sync start: version %d to %d engines by %s", version, len(servers), self._name)
        for server in servers:
            server.begin_loading(version)
        try:
            async with asyncio.timeout(self._timeout_s):
                sent = await send([server.address for server in servers], version)
        except TimeoutError as error:
            raise SyncError(
                f"weight_sync version {version} by {self._name} did not end within {self._timeout_s:g} s; engines: "
                f"{', '.join(server.url for server in servers)}. A trainer rank or an engine hangs: see their logs",
                late=late(version, self._timeout_s, [], transport=self._name),
            ) from error
        if before is not None:
            await in_thread(lambda: (before.finish(), sent.finish()))
            if sent.digest != before.digest:
                raise SyncError(
                    f"the trainer's weights are not version {version} any more; {servers[0].url} gets its weights with "
                    "the next publication"
                )
        sent_at = time.perf_counter()
        proof = asyncio.create_task(self._proof.check(servers, sent, version))
        if beside:
            self._unsettled = servers, sent, version, proof
        compared = "not yet verified" if beside else await proof
        for server in servers:
            server.finish_loading(version)
        verify_s = sent.verify_s + time.perf_counter() - sent_at
        seconds = time.perf_counter() - started
        wire = "" if sent.wire_bytes is None else f" ({sent.wire_bytes} sent)"
        logger.info(
            "weight_sync done: version %d, %d tensors, %d bytes%s, %.3f s, %s",
            version, sent.num_tensors, sent.num_bytes, wire, seconds, compared,
        )  # fmt: skip
        own = {} if beside else sent.own
        return SyncReport(version, sent.num_tensors, sent.num_bytes, seconds, verify_s, own, sent.wire_bytes), sent


def _unanswered(error: SyncError | EngineError) -> dict[str, str]:
    """Why the engines that gave no answer are lost, by URL; none where it may have been a trainer rank."""
    if isinstance(error, EngineTimeoutError):
        return {error.url: HANGS}
    if isinstance(error, NoAnswerError):
        return {error.url: f"{NO_ANSWER}: {error}"}
    if not isinstance(error, SyncError):
        return {}
    broken = {url: f"{NO_ANSWER}: {words}" for url, words in error.broken.items()}
    return dict.fromkeys(error.late["missing"] if error.late else (), HANGS) | broken


class RankWeightSender:
    """Implements `WeightSender` by the rank of this process. Others, if there are any, publish without being told."""

    def __init__(self, rank: RankSync) -> None:
        self.rank = rank

    async def send_weights(self, addresses: Sequence[EngineAddress], version: int) -> Sent:
        """Send this rank's part of the weights."""
        return await self.rank.send_weights(addresses, version)

    async def resend(self, addresses: Sequence[EngineAddress], version: int) -> bool:
        """Load what was published as `version` from where it is kept."""
        return await self.rank.resend(addresses, version)

    async def close_sync(self) -> None:
        """Release what the transport holds."""
        await self.rank.close()


class LocalWeightSender(RankWeightSender):
    """A trainer in this process, which is the only rank, and this process's clients."""

    def __init__(self, trainer: Trainer, servers: Servers, transport: Transport) -> None:
        self._find, self._known = servers, dict[str, WeightServer]()
        super().__init__(RankSync(trainer.weights, transport, connect=self._connect))

    async def servers(self) -> Sequence[WeightServer]:
        """The engines in use, which `publish` reaches by their addresses from now on."""
        found = await self._find()
        self.know(found)
        return found

    def know(self, servers: Sequence[WeightServer]) -> None:
        """Reach these servers by the clients given."""
        self._known |= {server.url: server for server in servers}

    @contextlib.asynccontextmanager
    async def _connect(self, addresses: Sequence[EngineAddress]) -> AsyncGenerator[Sequence[WeightServer]]:
        yield [self._known[address.url] for address in addresses]


class LocalSync(RemoteSync):
    """`RemoteSync` for a trainer in this process.

    Args:
        trainer: Whose weights are published.
        servers: Gives the engines that are in use.
        transport: How weights go.
        timeout_s, proves_beside, was_lost: As of `RemoteSync`.
    """

    def __init__(
        self,
        trainer: Trainer,
        servers: Servers,
        transport: Transport,
        *,
        timeout_s: float = TIMEOUT_S,
        proves_beside: bool = False,
        was_lost: WasLost | None = None,
    ) -> None:
        self._local = LocalWeightSender(trainer, servers, transport)
        super().__init__(
            self._local,
            self._local.servers,
            name=transport.name,
            timeout_s=timeout_s,
            proves_beside=proves_beside,
            was_lost=was_lost,
        )

    async def load(self, source: WeightSource, version: int) -> dict[str, str]:
        """`publish` weights of any source; returns the checksums of what was sent."""

        async def send(addresses: Sequence[EngineAddress], version: int) -> Sent:
            return await self._local.rank.send_weights(addresses, version, source=source)

        servers = await self._local.servers()
        report, sent = await self._update(servers, version, send)
        self._published = version, sent
        return report.checksums

    async def load_into(self, server: WeightServer, version: int) -> SyncReport | None:
        """`RemoteSync.load_into`, also for a server that is not in use yet."""
        self._local.know([server])
        return await super().load_into(server, version)
