"""The proof that weights arrived in engines outside this process, as strong as the server allows.

`furlong serve` has this program's checksums, so that every bit of every tensor is compared. SGLang hashes the tensors
of its own layout with a function of its own: where both are known (`sglang_layout.fused_checksums`), every tensor of every process is
compared, too. Of other servers, which have stages of a pipeline, quantized weights or another model family, rows of
tensors are compared where the model can show them, the checksum must change when the weights do and be equal in all
servers of one layout. What could not be compared is said in a warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

import torch

from furlong.core.trace import tracer
from furlong.errors import EngineError, NoAnswerError, SyncError
from furlong.sglang_layout.fused_checksums import APART, DENSE, WITH_EXPERTS, expected
from furlong.sglang_layout.shard_checksums import HEAD, kind_of
from furlong.weight_sync.checksum_compare import check_arrived, never_arrived
from furlong.weight_sync.daemon_threads import in_thread
from furlong.weight_sync.sent_weights import ROWS, Sent
from furlong.weight_sync.weight_server import WeightServer

logger = logging.getLogger(__name__)


def record_for(servers: Sequence[WeightServer]) -> Sent:
    """An empty record of what these servers need for comparison."""
    dtypes = [server.checksum_dtype for server in servers]
    on_device = [server for server in servers if server.device_dtypes]
    return Sent(
        frozenset(dtype for dtype in dtypes if dtype is not None),
        None in dtypes,
        frozenset().union(*(server.device_dtypes for server in on_device)),
        frozenset(server.processes for server in on_device if not server.rearranges_tensors),
    )


class Proof:
    """Verifies publications. Remembers the last one, to see that a server's weights changed when the trainer's did."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, str]] = {}  # url -> (digest sent, digest that the server reported)
        self._families: dict[str, str] = {}  # by url
        self._told: set[tuple[str, str]] = set()  # url and what a warning says of its server

    async def check(self, servers: Sequence[WeightServer], sent: Sent, version: int) -> str:
        """Compare what was sent with what the servers have; returns in words what was compared. Raises SyncError."""
        finished = in_thread(sent.finish)
        found = await asyncio.gather(*(self._check_one(server, sent, finished, version) for server in servers))
        alike: dict[str, set[str]] = {}  # by what servers say of themselves: others have other tensors
        for server, (_, digest) in zip(servers, found, strict=True):
            if digest:
                alike.setdefault(str(server.address.info), set()).add(digest)
        for digests in alike.values():
            if len(digests) > 1:
                raise SyncError(
                    f"weight_sync version {version}: engines of one model report different checksums "
                    f"{sorted(digests)}; they do not serve the same weights"
                )
        return "; ".join(sorted({words for words, _ in found}))

    async def _check_one(
        self, server: WeightServer, sent: Sent, finished: Awaitable[None], version: int
    ) -> tuple[str, str]:
        label = await server.served_version()
        if label != str(version):
            raise SyncError(f"weight_sync version {version}: {server.url} says that it serves version {label!r}")
        if (dtype := server.checksum_dtype) is not None:
            with tracer.flight("engine's checksums", url=server.url):
                loaded, _ = await server.checksums()
            await finished
            try:
                check_arrived(sent.expected(dtype, loaded), loaded, version=version)
            except SyncError as error:
                raise SyncError(f"{server.url}: {error}") from error
            return "every checksum verified", ""
        if server.url not in self._families:
            self._families[server.url] = await server.model_type()
        family = self._families[server.url]
        if server.has_own_head(family) and not sent.has_head:
            raise SyncError(
                f"weight_sync version {version}: {server.url} has an output layer ({HEAD}) of its own in a model of "
                f"the family {family!r}, and none was sent, since the trainer's is tied to the embedding: it would "
                "answer from weights that nobody trains. Untie the model (SYNC04 of docs/troubleshooting.md)"
            )
        if unused := server.unused_weights(family):
            self._warn(server, version, unused)
        if server.device_dtypes and (found := await self._compare_all(server, sent, finished, version)) is not None:
            return found
        await finished
        compared = await self._compare_rows(server, sent, version)
        digest = await self._compare_change(server, sent, version)
        if not compared:
            seen = "that they change is checked by its checksum" if digest else "only its version label is checked"
            what = f"shows no tensors of this model, so its weights are not compared with the trainer's; {seen}"
            self._warn(server, version, what)
        return f"{compared} tensors compared by rows, {'a' if digest else 'no'} checksum of the engine's own", digest

    async def _compare_all(
        self, server: WeightServer, sent: Sent, finished: Awaitable[None], version: int
    ) -> tuple[str, str] | None:
        """Compare every tensor in the server's layout, but experts whose layout is unknown; None if all of it is.

        Returns in words what was compared, and the server's checksum over all. Of stages the first alone is compared.
        """
        family, processes = self._families[server.url], server.processes
        if why := _unknown(server, family):
            return self._only_rows(server, version, why)
        with tracer.flight("engine's checksums", url=server.url):
            answered, digest = await server.all_checksums()
        await finished
        for name, why in sent.wrong.items():
            raise SyncError(f"weight_sync version {version}: {server.url} was not sent {name} as it must be: {why}")
        for name, why in sent.unhashed.items():
            return self._only_rows(server, version, f"has {name}, which cannot be hashed: {why}")
        for count in (processes.tp_size, processes.attention_tp_size, processes.head_tp_size):
            if count in sent.uncut:
                return self._only_rows(server, version, f"has shares {sent.uncut[count]}")
        if unknown := _unknown_experts(server, family, sent):
            self._warn(server, version, f"{unknown}, so of its experts only that they changed is seen")
        by_rank = _by_rank(server, answered, version, without_experts=bool(unknown))
        wanted = expected(sent.fused, by_rank[0], processes, without_experts=bool(unknown))
        is_part = server.num_stages > 1 and by_rank[0].keys() < wanted.keys()
        if wanted.keys() != by_rank[0].keys() and not is_part:
            names = sorted(wanted.keys() ^ by_rank[0].keys())
            what = f"has other tensors than {family} models have ({len(names)}, such as {names[0]})"
            return self._only_rows(server, version, what)
        for rank, loaded in sorted(by_rank.items()):
            right = expected(sent.fused, loaded, processes, rank, without_experts=bool(unknown))
            if is_part:
                right = {name: digest for name, digest in right.items() if name in by_rank[0]}
            try:
                check_arrived(right, loaded, version=version)
            except SyncError as error:
                which = f", process {rank} of {processes.tp_size}" if processes.tp_size > 1 else ""
                raise SyncError(f"{server.url}{which}: {error}") from error
        where = f" of the first of {server.num_stages} stages" if is_part else ""
        if not unknown:
            return f"every checksum{where} verified", digest
        self._check_change(server, sent, digest, version)
        return f"every checksum{where} but those of experts verified, a checksum of the engine's own", digest

    def _only_rows(self, server: WeightServer, version: int, why: str) -> None:
        """Say that only rows of a server's weights are compared."""
        self._warn(server, version, f"{why}, so only rows of its weights are compared")

    def _warn(self, server: WeightServer, version: int, what: str) -> None:
        """Say this of a server, once."""
        if (server.url, what) not in self._told:
            self._told.add((server.url, what))
            logger.warning("weight_sync version %d: %s %s", version, server.url, what)

    async def _compare_rows(self, server: WeightServer, sent: Sent, version: int) -> int:
        """Compare the first rows of tensors spread over the model; returns how many could be."""
        names = list(sent.rows)
        if server.processes.tp_size > 1:  # only tensors of one dimension are whole in each process
            names = [name for name in names if sent.rows[name].dim() == 1]
        compared = 0
        for name in names:
            shown = await server.first_rows(name, ROWS)
            if shown is None:
                continue
            compared += 1
            rows = sent.rows[name]
            right = [rows.to(kind).float() for kind in (rows.dtype, torch.bfloat16, torch.float16)]
            if not shown.any() and rows.any():
                raise never_arrived([name], version=version)
            if not any(shown.shape == want.shape and torch.equal(shown, want) for want in right):
                raise SyncError(
                    f"weight_sync version {version}: {server.url} has other values in {name} than were sent"
                )
        return compared

    async def _compare_change(self, server: WeightServer, sent: Sent, version: int) -> str:
        """Check that the server's checksum changed if the weights did; returns it, "" if the server has none."""
        try:
            _, digest = await server.checksums()
        except NoAnswerError:
            raise
        except EngineError as error:
            self._warn(server, version, f"has no checksum: {error}")
            return ""
        self._check_change(server, sent, digest, version)
        return digest

    def _check_change(self, server: WeightServer, sent: Sent, digest: str, version: int) -> None:
        """Raise SyncError if this checksum of a server changed and the trainer's did not, or the other way round.

        A server of several stages has that of the first, which may stay while weights of others change.
        """
        before = self._last.get(server.url)
        self._last[server.url] = (sent.digest, digest)
        if before is not None and (before[0] == sent.digest) != (before[1] == digest):
            change = "did not change" if before[1] == digest else "changed"
            if before[1] == digest and server.num_stages > 1:
                return
            raise SyncError(
                f"weight_sync version {version}: the weights of {server.url} {change}, unlike the trainer's, since the "
                "publication before"
            )


def _unknown(server: WeightServer, family: str) -> str:
    """What of a server is not known that has a model of this family; "" if it is known which tensors it has."""
    processes = server.processes
    if family not in DENSE | WITH_EXPERTS:
        return f"has a model of the family {family!r}, of which SGLang's layout is not known"
    if server.rearranges_tensors:
        return f"may have tensors in another form ({server.rearranges_tensors})"
    if processes.attention_tp_size != processes.tp_size and family not in APART:
        return f"has data-parallel attention in a model of the family {family!r}, of which the layout is not known"
    return ""


def _unknown_experts(server: WeightServer, family: str, sent: Sent) -> str:
    """What of the experts of a model of this family is not known; "" if it is known where they are."""
    if family not in WITH_EXPERTS:
        return ""
    if server.rearranges_experts:
        return f"rearranges experts ({server.rearranges_experts})"
    num, parts = server.processes.tp_size, server.processes.ep_size
    if parts != num:
        return f"cuts experts among {num // parts} processes"
    return f"has experts that {sent.uncut_experts[num]}" if num in sent.uncut_experts else ""


def _by_rank(
    server: WeightServer, answered: Sequence[tuple[int, dict[str, str]]], version: int, *, without_experts: bool
) -> dict[int, dict[str, str]]:
    """The checksums of each process. Raises SyncError if one did not answer, or in two ways."""
    found: dict[int, dict[str, str]] = {}
    for rank, every in answered:
        loaded = {name: digest for name, digest in every.items() if not without_experts or kind_of(name) != "experts"}
        known = found.setdefault(rank, loaded)
        if known != loaded:
            names = [name for name in known.keys() | loaded.keys() if known.get(name) != loaded.get(name)]
            raise SyncError(
                f"weight_sync version {version}: {server.url} has copies of process {rank} that differ in {len(names)} "
                f"tensors (first: {min(names)}); they do not serve the same weights"
            )
    if sorted(found) != list(range(server.processes.tp_size)):
        raise SyncError(
            f"weight_sync version {version}: {server.url} has checksums of processes {sorted(found)}, and should have "
            f"them of all {server.processes.tp_size} from 0 on; what the others have is not known"
        )
    return found
