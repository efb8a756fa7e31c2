"""What weight sync needs of engines outside this process, and the proof that weights arrived in them.

The proof is as strong as the server allows. `furlong serve` has this program's checksums, so that every bit of every
tensor is compared. SGLang hashes the tensors of its own layout with a function of its own: where both are known
(`sync.fused`), every tensor is compared, too. Of other servers, which have shards, quantized weights or another model
family, rows of tensors are compared where the model can show them, the checksum must change when the weights do and be
equal in all servers of one layout. What could not be compared is said in a warning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from furlong.core.device_checksum import FLUSH_BYTES, Checksums
from furlong.core.pulse import pulse
from furlong.core.trace import tracer
from furlong.core.weights import EngineAddress, NamedTensor, WeightSource, checksum
from furlong.errors import EngineError, SyncError
from furlong.sync.fused import FAMILIES, FusedChecksums, expected
from furlong.sync.verify import check_arrived, never_arrived

logger = logging.getLogger(__name__)

ROWS = 2  # of each tensor, kept for comparison
SAMPLES = 8  # tensors at least, where there are as many, whose rows are compared


class WeightServer(Protocol):
    """One engine outside this process. Commands raise EngineError with the server's own reason."""

    @property
    def url(self) -> str:
        """Its address."""
        ...

    @property
    def address(self) -> EngineAddress:
        """What another process needs to reach it."""
        ...

    @property
    def checksum_dtype(self) -> torch.dtype | None:
        """Precision of its weights if its checksums are `core.weights.checksum`, else None."""
        ...

    @property
    def device_dtypes(self) -> frozenset[torch.dtype]:
        """Precisions it may have its weights in if it hashes whole tensors by `core.device_checksum`; else empty."""
        ...

    @property
    def num_ranks(self) -> int:
        """Its tensor-parallel processes. Raises EngineError if it has others."""
        ...

    @property
    def first_rank(self) -> int:
        """The trainer rank on the GPU of its first process, where they share GPUs."""
        ...

    @property
    def takes_shared_memory(self) -> bool:
        """Whether buffers on the same machine are POSIX shared memory, and not CUDA memory."""
        ...

    def begin_loading(self, version: int) -> None:
        """Answer no requests from now on."""
        ...

    def finish_loading(self, version: int) -> None:
        """Answer requests again, with these weights."""
        ...

    async def served_version(self) -> str:
        """Label of the weights in use."""
        ...

    async def model_type(self) -> str:
        """Family of its model, as Hugging Face configs name it."""
        ...

    async def checksums(self) -> tuple[dict[str, str], str]:
        """Checksum of every tensor under the server's own names, and one over all."""
        ...

    async def first_rows(self, name: str, rows: int) -> Tensor | None:
        """First rows of a tensor in float32, None if it cannot show them."""
        ...

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a folder of safetensors files."""
        ...

    async def update_from_delta(self, folder: str, version: int) -> None:
        """Apply a `core.delta` folder to the weights it has."""
        ...

    async def join_group(self, *, name: str, address: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Join a process group of which the trainer is rank 0."""
        ...

    async def receive(self, group: str, tensors: Sequence[NamedTensor], version: int, *, is_last: bool) -> None:
        """Receive these tensors in this order."""
        ...

    async def leave_group(self, name: str) -> None:
        """Leave a process group."""
        ...

    async def load_shared(self, name: str, tensors: list[dict[str, Any]], version: int, *, is_last: bool) -> None:
        """Load a `SharedBuffer`."""
        ...

    async def load_handles(self, handles: Sequence[bytes], version: int, *, is_last: bool) -> None:
        """Load CUDA memory, by one message for each process."""
        ...


@dataclass
class Sent:
    """What the trainer sent, recorded while it goes by: checksums as the engines will have them, and some rows.

    A tensor on a GPU is copied to the host only for a `furlong serve`, whose checksums are made there. `own` has the
    trainer's checksums: by its own names, or, of tensors on a GPU that SGLang gets, by SGLang's. They are computed on a
    stream beside the one that sends, and are there after `finish`. `verify_s` is the time that this took the process.
    """

    dtypes: frozenset[torch.dtype]
    keep_rows: bool
    device_dtypes: frozenset[torch.dtype] = frozenset()
    sums: dict[torch.dtype, dict[str, str]] = field(default_factory=dict[torch.dtype, dict[str, str]])
    fused: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    own: dict[str, str] = field(default_factory=dict[str, str])
    rows: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    num_tensors: int = 0
    num_bytes: int = 0
    wire_bytes: int | None = None
    verify_s: float = 0.0
    _unfinished: Callable[[], None] | None = None

    @staticmethod
    def to(servers: Sequence[WeightServer]) -> Sent:
        """An empty record of what these servers need for comparison."""
        dtypes = [server.checksum_dtype for server in servers]
        on_device = [server.device_dtypes for server in servers]
        return Sent(
            frozenset(dtype for dtype in dtypes if dtype is not None), None in dtypes, frozenset().union(*on_device)
        )

    def watched(self, source: WeightSource) -> WeightSource:
        """The same source; what is read of it is recorded, and complete after `finish`."""
        fused = FusedChecksums(self.device_dtypes) if self.device_dtypes else None
        on_device, beside = Checksums(flush_bytes=None), _Beside()
        spread = _Spread(), _Spread()

        def flush() -> None:
            for sums in [on_device, *(fused.sums if fused is not None else ())]:
                if waiting := sums.waiting:
                    with beside.reading(waiting), tracer.span("start checksums", num_bytes=sums.waiting_bytes):
                        sums.flush()

        def read() -> Iterator[NamedTensor]:
            recorded = 0
            for name, tensor in source.open():
                started = time.perf_counter()
                self._record(name, tensor.detach(), on_device, fused, spread)
                recorded += tensor.nbytes
                if recorded >= FLUSH_BYTES:
                    flush()
                    recorded = 0
                self.verify_s += time.perf_counter() - started
                yield name, tensor

        def finish() -> None:
            flush()
            beside.wait()
            self._finish(on_device, fused, spread)

        self._unfinished = finish
        return WeightSource(read)

    def finish(self) -> None:
        """Wait for the checksums, once the source was read to the end; again is nothing."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            started = time.perf_counter()
            with tracer.span("finish checksums"):
                unfinished()
            self.verify_s += time.perf_counter() - started

    def _record(
        self, name: str, tensor: Tensor, on_device: Checksums, fused: FusedChecksums | None, spread: Sequence[_Spread]
    ) -> None:
        pulse.beat("published tensor")
        self.num_tensors += 1
        self.num_bytes += tensor.nbytes
        if fused is not None:
            fused.add(name, tensor)
        if not tensor.is_cuda or self.dtypes:
            self.own[name] = checksum(tensor)
        elif fused is None:
            on_device.add(name, [tensor])
        for dtype in self.dtypes:
            is_own = tensor.dtype == dtype or not tensor.is_floating_point()
            self.sums.setdefault(dtype, {})[name] = self.own[name] if is_own else checksum(tensor.to(dtype))
        if self.keep_rows:
            of_all, of_simple = spread
            of_all.offer(name, tensor)
            if tensor.dim() == 1:
                of_simple.offer(name, tensor)

    def _finish(self, on_device: Checksums, fused: FusedChecksums | None, spread: Sequence[_Spread]) -> None:
        """Wait for the device, and take from it what is compared."""
        self.own |= on_device.digests()
        if fused is not None:
            self.fused = fused.digests()
            if len(self.own) < self.num_tensors:
                self.own |= {name: digests[0] for name, digests in self.fused.items()}
        self.rows = _on_host({name: rows for some in spread for name, rows in some.kept.items()})

    @property
    def digest(self) -> str:
        """One checksum over all tensors."""
        return xxhash.xxh3_128_hexdigest("".join(f"{name}{self.own[name]}" for name in sorted(self.own)).encode())

    def expected(self, dtype: torch.dtype, loaded: dict[str, str]) -> dict[str, str]:
        """The checksums that an engine of this precision has; it may keep a tensor in the precision it came in."""
        return {
            name: self.own[name] if loaded.get(name) == self.own[name] else value
            for name, value in self.sums[dtype].items()
        }


class _Spread:
    """First rows of some of many tensors, spread evenly over them; how many will come need not be known."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self._step, self._count = 1, 0

    def offer(self, name: str, tensor: Tensor) -> None:
        """Copy the rows of every `step`-th tensor, and of twice as few once that makes too many."""
        if self._count % self._step == 0:
            self.kept[name] = tensor[:ROWS].clone()
        self._count += 1
        if len(self.kept) >= 2 * SAMPLES:
            self._step *= 2
            for each in list(self.kept)[1::2]:
                del self.kept[each]


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in host memory, by one copy for each precision and device."""
    alike: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    found: dict[str, Tensor] = {}
    for some in alike.values():
        copied = torch.cat([tensor.reshape(-1) for tensor in some.values()]).cpu()
        pieces = copied.split([tensor.numel() for tensor in some.values()])
        found |= {name: piece.view(some[name].shape) for name, piece in zip(some, pieces, strict=True)}
    return found


class _Beside:
    """A stream of each GPU for what only reads tensors, so that sending them does not wait for it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def reading(self, tensors: Sequence[Tensor]) -> Generator[None]:
        """Run what is inside on the streams, which wait for what was asked of these tensors' GPUs so far."""
        there = [tensor for tensor in tensors if tensor.is_cuda]
        with contextlib.ExitStack() as stack:
            for device in dict.fromkeys(tensor.device for tensor in there):
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)
                self._streams[device].wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield
        for tensor in there:
            tensor.record_stream(self._streams[tensor.device])  # its memory is not given to another before it was read

    def wait(self) -> None:
        """Wait for all that was asked."""
        for stream in self._streams.values():
            stream.synchronize()


class Proof:
    """Verifies publications. Remembers the last one, to see that a server's weights changed when the trainer's did."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, str]] = {}  # url -> (digest sent, digest that the server reported)

    async def check(self, servers: Sequence[WeightServer], sent: Sent, version: int) -> str:
        """Compare what was sent with what the servers have; returns in words what was compared. Raises SyncError."""
        sent.finish()
        found = await asyncio.gather(*(self._check_one(server, sent, version) for server in servers))
        digests = {digest for _, digest in found if digest}
        if len(digests) > 1:
            raise SyncError(
                f"weight_sync version {version}: engines of one model report different checksums {sorted(digests)}; "
                "they do not serve the same weights"
            )
        return "; ".join(sorted({words for words, _ in found}))

    async def _check_one(self, server: WeightServer, sent: Sent, version: int) -> tuple[str, str]:
        label = await server.served_version()
        if label != str(version):
            raise SyncError(f"weight_sync version {version}: {server.url} says that it serves version {label!r}")
        if (dtype := server.checksum_dtype) is not None:
            with tracer.flight("engine's checksums", url=server.url):
                loaded, _ = await server.checksums()
            try:
                check_arrived(sent.expected(dtype, loaded), loaded, version=version)
            except SyncError as error:
                raise SyncError(f"{server.url}: {error}") from error
            return "every checksum verified", ""
        if server.device_dtypes and sent.fused and (found := await self._compare_all(server, sent, version)):
            return "every checksum verified", found
        compared = await self._compare_rows(server, sent, version)
        digest = await self._compare_change(server, sent, version)
        if not compared:
            logger.warning(
                "weight_sync version %d: %s shows no tensors of this model, so its weights were not compared with the "
                "trainer's; %s",
                version,
                server.url,
                "that they changed was checked by its checksum" if digest else "only its version label was checked",
            )
        return f"{compared} tensors compared by rows, {'a' if digest else 'no'} checksum of the engine's own", digest

    async def _compare_all(self, server: WeightServer, sent: Sent, version: int) -> str:
        """Compare every tensor in the server's layout; returns its checksum over all, "" if the layout is unknown."""
        family = await server.model_type()
        if family not in FAMILIES:
            return ""
        with tracer.flight("engine's checksums", url=server.url):
            loaded, digest = await server.checksums()
        wanted = expected(sent.fused, loaded)
        if wanted.keys() != loaded.keys():
            names = sorted(wanted.keys() ^ loaded.keys())
            logger.warning(
                "weight_sync version %d: %s has other tensors than %s models have (%d, such as %s), so only rows of "
                "its weights are compared",
                version, server.url, family, len(names), names[0],
            )  # fmt: skip
            return ""
        try:
            check_arrived(wanted, loaded, version=version)
        except SyncError as error:
            raise SyncError(f"{server.url}: {error}") from error
        return digest

    async def _compare_rows(self, server: WeightServer, sent: Sent, version: int) -> int:
        """Compare the first rows of tensors spread over the model; returns how many could be."""
        names = list(sent.rows)
        if server.num_ranks > 1:  # of several ranks only tensors that are not sharded are shown whole
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
        except EngineError as error:
            logger.warning("weight_sync version %d: %s has no checksum: %s", version, server.url, error)
            return ""
        before = self._last.get(server.url)
        self._last[server.url] = (sent.digest, digest)
        if before is not None and (before[0] == sent.digest) != (before[1] == digest):
            change = "did not change" if before[1] == digest else "changed"
            raise SyncError(
                f"weight_sync version {version}: the weights of {server.url} {change}, unlike the trainer's, since the "
                "publication before"
            )
        return digest


async def each(
    version: int,
    what: str,
    calls: Mapping[str, Awaitable[None]],
    *,
    timeout_s: float | None = None,
    bucket: int | None = None,
    group: str = "",
) -> None:
    """Await one call per server. Raises SyncError naming every server that failed, with its own message.

    Servers that have not answered after `timeout_s` are named, too; `bucket` and `group` say what they lack.
    """
    tasks = {url: asyncio.ensure_future(call) for url, call in calls.items()}
    try:
        if tasks:
            await asyncio.wait(tasks.values(), timeout=timeout_s)
        silent = [url for url, task in tasks.items() if not task.done()]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    failed = [f"{url}: did not answer within {timeout_s:g} s" for url in silent]
    for url, task in tasks.items():
        if url in silent or (error := task.exception()) is None:
            continue
        if not isinstance(error, EngineError):
            raise error
        failed.append(f"{url}: {error}")
    if failed:
        raise SyncError(
            f"weight_sync version {version}: {len(failed)} of {len(calls)} engines failed to {what}. "
            + "; ".join(failed),
            late=late(version, timeout_s, silent, bucket=bucket, group=group) if timeout_s and silent else None,
        )


def late(
    version: int, seconds: float, missing: Sequence[str], *, bucket: int | None = None, group: str = ""
) -> dict[str, Any]:
    """What a SyncError says of engines that did not answer in time; the fields of the event `publication_timeout`."""
    return {"version": version, "seconds": seconds, "bucket": bucket, "group": group, "missing": list(missing)}
