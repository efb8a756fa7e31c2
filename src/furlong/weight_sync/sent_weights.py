"""The record that a trainer rank makes of the weights while it sends them, for the proof that they arrived.

Reading ahead is in one thread, packing what was read in another, and each of torch's operations lets the other go
first. So what is recorded of a tensor needs none, and its bytes are read by one launch for many tensors.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from furlong.core.device_checksum import FLUSH_BYTES, Checksums
from furlong.core.heartbeat import heartbeat
from furlong.core.trace import tracer
from furlong.core.weights import UNSHARDED, EngineSharding, NamedTensor, Shard, WeightSource, checksum
from furlong.sglang_layout.fused_checksums import WHOLE, FusedChecksums
from furlong.sglang_layout.shard_checksums import HEAD, ShardChecksums

_FINISHING = threading.Lock()
ROWS = 2  # of each tensor, kept for comparison
SAMPLES = 8  # tensors at least, where there are as many, whose rows are compared


@dataclass
class Sent:
    """What the trainer sent, recorded while it goes by: checksums as the engines will have them, and some rows.

    A tensor on a GPU is copied to the host only for a `furlong serve`, whose checksums are made there. `own` has the
    trainer's checksums: by its own names, or, of tensors on a GPU that SGLang gets, by SGLang's, as `fused` has them.
    `wrong` and `unhashed` say of SGLang's tensors which of them were not sent as they must be, and which can not be
    compared by `fused`; `uncut` and `uncut_experts` of how many `processes`' shares the latter is so, and why.
    `verify_s` is the time that checksums took.

    A device reads live weights at once when all were sent and `start` is called; what it is asked for from then on, by
    whoever changes weights or gives their memory away, waits for that, and nobody else does. Tensors that were made to
    be sent are read while others are. `finish` waits for the checksums.
    """

    dtypes: frozenset[torch.dtype]
    keep_rows: bool
    device_dtypes: frozenset[torch.dtype] = frozenset()
    processes: frozenset[EngineSharding] = frozenset([UNSHARDED])
    sums: dict[torch.dtype, dict[str, str]] = field(default_factory=dict[torch.dtype, dict[str, str]])
    fused: dict[Shard, dict[str, list[str]]] = field(default_factory=dict[Shard, dict[str, list[str]]])
    wrong: dict[str, str] = field(default_factory=dict[str, str])
    unhashed: dict[str, str] = field(default_factory=dict[str, str])
    uncut: dict[int, str] = field(default_factory=dict[int, str])
    uncut_experts: dict[int, str] = field(default_factory=dict[int, str])
    own: dict[str, str] = field(default_factory=dict[str, str])
    rows: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    has_head: bool = False
    num_tensors: int = 0
    num_bytes: int = 0
    wire_bytes: int | None = None
    verify_s: float = 0.0
    is_read: bool = False
    _record: _Record | None = None

    def watched(self, source: WeightSource) -> WeightSource:
        """The same source; what is read of it is recorded."""

        def read() -> Iterator[NamedTensor]:
            record = _Record(self, source)
            for name, tensor in source.open():
                started = time.perf_counter()
                record.add(name, tensor)
                self.verify_s += time.perf_counter() - started
                yield name, tensor
            with self._timed():
                record.end()
            self._record, self.is_read = record, True
            if not source.is_live:
                self.finish()

        return WeightSource(read, is_live=source.is_live)

    def start(self) -> None:
        """Have the device read live weights, once all were sent."""
        if self._record is not None:
            with self._timed():
                self._record.read()

    def finish(self) -> None:
        """Wait until it has read them, and take from it what is compared; again is nothing. For any thread."""
        with _FINISHING, self._timed(), tracer.span("finish checksums"):
            record, self._record = self._record, None
            if record is not None:
                record.finish()

    @contextlib.contextmanager
    def _timed(self) -> Generator[None]:
        started = time.perf_counter()
        yield
        self.verify_s += time.perf_counter() - started

    @functools.cached_property
    def digest(self) -> str:
        """One checksum over all tensors, after `finish`."""
        assert self._record is None
        return xxhash.xxh3_128_hexdigest("".join(f"{name}{self.own[name]}" for name in sorted(self.own)).encode())

    def expected(self, dtype: torch.dtype, loaded: dict[str, str]) -> dict[str, str]:
        """The checksums that an engine of this precision has; it may keep a tensor in the precision it came in."""
        return {
            name: self.own[name] if loaded.get(name) == self.own[name] else value
            for name, value in self.sums[dtype].items()
        }


class _Record:
    """One pass over the weights, and what of it the device still has to do."""

    def __init__(self, sent: Sent, source: WeightSource) -> None:
        self._sent, self._is_live = sent, source.is_live
        self._fused = None
        if sent.device_dtypes:
            self._fused = FusedChecksums(
                sent.device_dtypes, sent.processes, num_kv_heads=source.num_kv_heads, num_experts=source.num_experts
            )
        self._on_device, self._beside = Checksums(flush_bytes=None), _Beside()
        self._of_all, self._of_simple = _Spread(), _Spread()
        self._num_waiting = 0  # bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Record a tensor; every so many bytes the device is asked to read those that came, but not what is live."""
        heartbeat.beat("published tensor")
        sent, num_bytes = self._sent, tensor.nbytes
        sent.num_tensors += 1
        sent.has_head |= name == HEAD
        sent.num_bytes += num_bytes
        if self._fused is not None:
            self._fused.add(name, tensor)
        if not tensor.is_cuda or sent.dtypes:
            sent.own[name] = checksum(tensor)
        elif self._fused is None:
            self._on_device.add(name, [tensor])
        for dtype in sent.dtypes:
            is_own = tensor.dtype == dtype or not tensor.is_floating_point()
            sent.sums.setdefault(dtype, {})[name] = sent.own[name] if is_own else checksum(tensor.to(dtype))
        if sent.keep_rows:
            self._of_all.offer(name, tensor)
            if tensor.ndim == 1:
                self._of_simple.offer(name, tensor)
        if self._is_live and (self._fused is None or self._fused.keeps(tensor.dtype)):
            return
        self._num_waiting += num_bytes
        if self._num_waiting >= FLUSH_BYTES:
            self._copy_rows()
            self.read()

    def end(self) -> None:
        """The last tensor was recorded."""
        self._copy_rows()
        for sums in self._sums:
            sums.prepare()
        if not self._is_live:
            self.read()
        self._beside.follow_others()

    def read(self) -> None:
        """Have the device read what waits for it."""
        self._num_waiting = 0
        if waiting := [tensor for sums in self._sums for tensor in sums.waiting]:
            num_bytes = sum(sums.waiting_bytes for sums in self._sums)
            with tracer.span("start checksums", num_bytes=num_bytes), self._beside.reading(waiting):
                for sums in self._sums:
                    sums.flush()
        if self._is_live:
            self._beside.hold_others()

    def finish(self) -> None:
        """Wait for the device, and take from it what is compared."""
        sent = self._sent
        with self._beside.alone():
            sent.own |= self._on_device.digests()
            if self._fused is not None:
                sent.fused = self._fused.digests()
                sent.wrong, sent.unhashed = self._fused.wrong(), self._fused.unhashed()
                sent.uncut, sent.uncut_experts = self._fused.uncut, self._fused.uncut_experts
                if len(sent.own) < sent.num_tensors:
                    sent.own |= {name: digests[0] for name, digests in sent.fused[WHOLE].items()}
            sent.rows = _on_host(self._of_all.rows | self._of_simple.rows)

    @property
    def _sums(self) -> list[Checksums | ShardChecksums]:
        return [self._on_device, *(self._fused.sums if self._fused is not None else ())]

    def _copy_rows(self) -> None:
        self._of_all.copy()
        self._of_simple.copy()


class _Spread:
    """First rows of some of many tensors, spread evenly over them; how many will come need not be known."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor | None] = {}  # None: its rows were copied
        self._step, self._count = 1, 0

    def offer(self, name: str, tensor: Tensor) -> None:
        """Keep every `step`-th tensor, and half of those kept once that makes too many."""
        if self._count % self._step == 0:
            self._kept[name] = tensor
        self._count += 1
        if len(self._kept) >= 2 * SAMPLES:
            self._step *= 2
            for each in list(self._kept)[1::2]:
                del self._kept[each]

    def copy(self) -> None:
        """Copy the rows of those kept, which may change or be gone from now on."""
        for name, tensor in self._kept.items():
            if tensor is not None:
                self.rows[name] = tensor.detach()[:ROWS].clone()
                self._kept[name] = None
        for name in self.rows.keys() - self._kept.keys():
            del self.rows[name]


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


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """The one that reads what another stream sends."""
    return torch.cuda.Stream(device)


class _Beside:
    """Reads tensors on a stream of its own, so that sending them does not wait for it.

    What is read is held until the next reading, before which the stream that may give its memory to others is told to
    wait for this one.
    """

    def __init__(self) -> None:
        self._held: Sequence[Tensor] = []
        self._devices: set[torch.device] = set()

    @contextlib.contextmanager
    def reading(self, tensors: Sequence[Tensor]) -> Generator[None]:
        """Run what is inside beside what the current streams of these tensors' GPUs do after what they do so far."""
        self.hold_others()
        self._devices |= {tensor.device for tensor in tensors if tensor.is_cuda}
        self.follow_others()
        with self._on_streams():
            yield
        self._held = tensors

    def follow_others(self) -> None:
        """Wait, on the streams beside, for what the current ones do so far."""
        for device in self._devices:
            _stream_beside(device).wait_stream(torch.cuda.current_stream(device))

    def hold_others(self) -> None:
        """Have the current streams wait for what was asked so far, and let go of it."""
        for device in self._devices:
            torch.cuda.current_stream(device).wait_stream(_stream_beside(device))
        self._held = []

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Run what is inside after what was asked so far, whatever others do; what was read is let go of afterwards."""
        with self._on_streams():
            yield
        for device in self._devices:
            _stream_beside(device).synchronize()
        self._held = []

    @contextlib.contextmanager
    def _on_streams(self) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for device in self._devices:
                stack.enter_context(torch.cuda.stream(_stream_beside(device)))
            yield
