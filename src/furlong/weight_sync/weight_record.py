"""The record that a trainer rank makes of the weights while it sends them, to verify later that they arrived.

One thread reads ahead while another packs what was read, and every torch operation may switch between them. Recording
a tensor therefore uses none, and the bytes of many tensors are hashed by one kernel launch.
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
from furlong.core.tracing import heartbeat, tracer
from furlong.core.weights import UNSHARDED, EngineSharding, NamedTensor, TensorShard, WeightSource, checksum
from furlong.quantization.scheme import is_stored_part
from furlong.sglang_layout.fused_checksums import WHOLE, FusedChecksums
from furlong.sglang_layout.shard_checksums import HEAD, ShardChecksums

_FINISHING = threading.Lock()
ROWS = 2  # kept of each sampled tensor
SAMPLES = 8  # tensors, at least, whose rows are compared (if there are as many)


@dataclass
class WeightRecord:
    """Record of the weights sent: the checksums that the engines should report, and some rows for comparison.

    dtypes: precisions of `furlong serve` engines, whose checksums are computed on the host; only for them are tensors
        on a GPU copied there.
    keep_rows: whether to keep rows, for servers without known checksums.
    device_dtypes, shardings: precisions and shardings of SGLang servers that hash their weights on the device.
    sums: by precision and name. fused: by shard and SGLang's name, from `FusedChecksums.digests`.
    wrong, unhashed: SGLang's tensors that were sent incorrectly, or whose checksum cannot be known, and why.
    uncut, uncut_experts: numbers of processes whose shards have no known checksum, and why.
    is_quantized: whether some weights were sent quantized; rows and SGLang's checksums are kept of the others.
    checksums: the trainer's checksums by its own names; for tensors on a GPU sent to SGLang, by SGLang's names.
    verify_s: seconds spent on checksums.

    Live weights are hashed on a side stream after `start`; later work on the current stream, which may change or free
    them, waits for that. Tensors made only to be sent are hashed while others are sent. `finish` waits for the result.
    """

    dtypes: frozenset[torch.dtype]
    keep_rows: bool
    device_dtypes: frozenset[torch.dtype] = frozenset()
    shardings: frozenset[EngineSharding] = frozenset([UNSHARDED])
    sums: dict[torch.dtype, dict[str, str]] = field(default_factory=dict[torch.dtype, dict[str, str]])
    fused: dict[TensorShard, dict[str, list[str]]] = field(default_factory=dict[TensorShard, dict[str, list[str]]])
    wrong: dict[str, str] = field(default_factory=dict[str, str])
    unhashed: dict[str, str] = field(default_factory=dict[str, str])
    uncut: dict[int, str] = field(default_factory=dict[int, str])
    uncut_experts: dict[int, str] = field(default_factory=dict[int, str])
    checksums: dict[str, str] = field(default_factory=dict[str, str])
    rows: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    is_quantized: bool = False
    has_head: bool = False
    num_tensors: int = 0
    num_bytes: int = 0
    wire_bytes: int | None = None
    verify_s: float = 0.0
    is_read: bool = False
    _recorder: _Recorder | None = None

    def recording(self, source: WeightSource) -> WeightSource:
        """Wrap `source` so that everything read from it is recorded."""

        def read() -> Iterator[NamedTensor]:
            recorder = _Recorder(self, source)
            for name, tensor in source.open():
                started = time.perf_counter()
                recorder.add(name, tensor)
                self.verify_s += time.perf_counter() - started
                yield name, tensor
            with self._timed():
                recorder.end()
            self._recorder, self.is_read = recorder, True

        return WeightSource(read, is_live=source.is_live)

    def start(self) -> None:
        """Queue the hashing of live weights on the device. Call once all have been sent."""
        if self._recorder is not None:
            with self._timed():
                self._recorder.hash_waiting()

    def finish(self) -> None:
        """Wait for the checksums and fetch them from the device. Idempotent; callable from any thread."""
        with _FINISHING, self._timed(), tracer.span("finish checksums"):
            recorder, self._recorder = self._recorder, None
            if recorder is not None:
                recorder.finish()

    @contextlib.contextmanager
    def _timed(self) -> Generator[None]:
        started = time.perf_counter()
        yield
        self.verify_s += time.perf_counter() - started

    @functools.cached_property
    def digest(self) -> str:
        """One checksum over all tensors; available after `finish`."""
        assert self._recorder is None
        lines = [f"{name}{digest}" for name, digest in sorted(self.checksums.items())]
        return xxhash.xxh3_128_hexdigest("".join(lines).encode())

    def expected(self, dtype: torch.dtype, loaded: dict[str, str]) -> dict[str, str]:
        """Return the checksums that an engine of this precision should have; it may keep a tensor's own precision."""
        return {
            name: self.checksums[name] if loaded.get(name) == self.checksums[name] else value
            for name, value in self.sums[dtype].items()
        }


class _Recorder:
    """One pass over the weights, with the hashing that the device has not done yet."""

    def __init__(self, record: WeightRecord, source: WeightSource) -> None:
        self._record, self._is_live = record, source.is_live
        self._fused = None
        if record.device_dtypes:
            self._fused = FusedChecksums(
                record.device_dtypes,
                record.shardings,
                num_kv_heads=source.num_kv_heads,
                num_experts=source.num_experts,
            )
        self._on_device, self._side_stream = Checksums(flush_bytes=None), _SideStream()
        self._rows_of_all, self._rows_of_vectors = _RowSamples(), _RowSamples()
        self._waiting_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Record a tensor. Those that are not live weights are hashed every `FLUSH_BYTES`."""
        heartbeat.beat("tensor sent")
        record, num_bytes = self._record, tensor.nbytes
        record.num_tensors += 1
        record.has_head |= name == HEAD
        record.num_bytes += num_bytes
        is_part = record.is_quantized and is_stored_part(name, tensor.dtype)
        fused = None if is_part else self._fused
        if fused is not None:
            fused.add(name, tensor)
        if not tensor.is_cuda or record.dtypes:
            record.checksums[name] = checksum(tensor)
        elif fused is None:
            self._on_device.add(name, [tensor])
        for dtype in record.dtypes:
            is_same = tensor.dtype == dtype or not tensor.is_floating_point()
            record.sums.setdefault(dtype, {})[name] = record.checksums[name] if is_same else checksum(tensor.to(dtype))
        if record.keep_rows and not is_part:
            self._rows_of_all.offer(name, tensor)
            if tensor.ndim == 1:
                self._rows_of_vectors.offer(name, tensor)
        if self._is_live and (fused is None or fused.keeps(tensor.dtype)):
            return
        self._waiting_bytes += num_bytes
        if self._waiting_bytes >= FLUSH_BYTES:
            self._copy_rows()
            self.hash_waiting()

    def end(self) -> None:
        """Finish the pass, after the last tensor."""
        self._copy_rows()
        for sums in self._sums:
            sums.prepare()
        if not self._is_live:
            self.hash_waiting()
        self._side_stream.wait_for_current()

    def hash_waiting(self) -> None:
        """Queue the hashing of all waiting tensors on the device."""
        self._waiting_bytes = 0
        if waiting := [tensor for sums in self._sums for tensor in sums.waiting]:
            num_bytes = sum(sums.waiting_bytes for sums in self._sums)
            with tracer.span("start checksums", num_bytes=num_bytes), self._side_stream.reading(waiting):
                for sums in self._sums:
                    sums.flush()
        if self._is_live:
            self._side_stream.release()

    def finish(self) -> None:
        """Wait for the device and store its results in the record."""
        record = self._record
        with self._side_stream.synchronized():
            record.checksums |= self._on_device.digests()
            if self._fused is not None:
                record.fused = self._fused.digests()
                record.wrong, record.unhashed = self._fused.wrong(), self._fused.unhashed()
                record.uncut, record.uncut_experts = self._fused.uncut, self._fused.uncut_experts
                if len(record.checksums) < record.num_tensors:
                    record.checksums |= {name: digests[0] for name, digests in record.fused[WHOLE].items()}
            record.rows = _on_host(self._rows_of_all.rows | self._rows_of_vectors.rows)

    @property
    def _sums(self) -> list[Checksums | ShardChecksums]:
        return [self._on_device, *(self._fused.sums if self._fused is not None else ())]

    def _copy_rows(self) -> None:
        self._rows_of_all.copy()
        self._rows_of_vectors.copy()


class _RowSamples:
    """The first rows of some tensors, spread evenly over all of them, whose number need not be known in advance."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor | None] = {}  # None: its rows were copied
        self._step, self._count = 1, 0

    def offer(self, name: str, tensor: Tensor) -> None:
        """Keep every `step`-th tensor; once there are too many, drop every other one and double the step."""
        if self._count % self._step == 0:
            self._kept[name] = tensor
        self._count += 1
        if len(self._kept) >= 2 * SAMPLES:
            self._step *= 2
            for each in list(self._kept)[1::2]:
                del self._kept[each]

    def copy(self) -> None:
        """Copy the rows of the kept tensors, which may change or be freed afterwards."""
        for name, tensor in self._kept.items():
            if tensor is not None:
                self.rows[name] = tensor.detach()[:ROWS].clone()
                self._kept[name] = None
        for name in self.rows.keys() - self._kept.keys():
            del self.rows[name]


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory, with one copy per precision and device."""
    alike: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    copies: dict[str, Tensor] = {}
    for some in alike.values():
        joined = torch.cat([tensor.reshape(-1) for tensor in some.values()]).cpu()
        pieces = joined.split([tensor.numel() for tensor in some.values()])
        copies |= {name: piece.view(some[name].shape) for name, piece in zip(some, pieces, strict=True)}
    return copies


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that hashes tensors while the current stream sends them."""
    return torch.cuda.Stream(device)


class _SideStream:
    """Reads tensors on a side stream, so that sending them does not wait for it.

    Tensors are kept alive until the next reading. Before they are released, the current stream, which may reuse their
    memory, is made to wait for the side stream.
    """

    def __init__(self) -> None:
        self._reading: Sequence[Tensor] = []
        self._devices: set[torch.device] = set()

    @contextlib.contextmanager
    def reading(self, tensors: Sequence[Tensor]) -> Generator[None]:
        """Run the body on the side streams of these tensors' GPUs, after the current streams' work so far."""
        self.release()
        self._devices |= {tensor.device for tensor in tensors if tensor.is_cuda}
        self.wait_for_current()
        with self._on_streams():
            yield
        self._reading = tensors

    def wait_for_current(self) -> None:
        """Make the side streams wait for the work queued on the current streams so far."""
        for device in self._devices:
            _side_stream(device).wait_stream(torch.cuda.current_stream(device))

    def release(self) -> None:
        """Make the current streams wait for the side streams, and release the tensors."""
        for device in self._devices:
            torch.cuda.current_stream(device).wait_stream(_side_stream(device))
        self._reading = []

    @contextlib.contextmanager
    def synchronized(self) -> Generator[None]:
        """Run the body on the side streams, wait until they are done, and release the tensors."""
        with self._on_streams():
            yield
        for device in self._devices:
            _side_stream(device).synchronize()
        self._reading = []

    @contextlib.contextmanager
    def _on_streams(self) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for device in self._devices:
                stack.enter_context(torch.cuda.stream(_side_stream(device)))
            yield
