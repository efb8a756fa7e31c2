"""The record that a trainer rank makes of the weights while it sends them, to verify later that they arrived."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from furlong.core.tracing import heartbeat, tracer
from furlong.core.weights import UNSHARDED, EngineSharding, NamedTensor, TensorShard, WeightSource, checksum
from furlong.quantization.scheme import is_stored_part
from furlong.sglang_layout.layout_checksums import HEAD, WHOLE, LayoutChecksums
from furlong.transfer.device_checksum import Checksums

_FINISHING = threading.Lock()
ROWS = 2  # kept of each sampled tensor
SAMPLES = 8  # tensors, at least, whose rows are compared (if there are as many)


class _RowSamples:
    """The first rows of some tensors, spread evenly over all of them, whose number need not be known in advance."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}
        self._step, self._count = 1, 0

    def offer(self, name: str, tensor: Tensor) -> None:
        """Keep every `step`-th tensor; once there are too many, drop every other one and double the step."""
        if self._count % self._step == 0:
            self.rows[name] = tensor.detach()[:ROWS].clone()
        self._count += 1
        if len(self.rows) >= 2 * SAMPLES:
            self._step *= 2
            for each in list(self.rows)[1::2]:
                del self.rows[each]


@dataclass
class WeightRecord:
    """Record of the weights sent: the checksums that the engines should report, and some rows for comparison.

    dtypes: precisions of `furlong serve` engines, whose checksums are computed on the host; only for them are tensors
        on a GPU copied there.
    keep_rows: whether to keep rows, for servers without known checksums.
    device_dtypes, shardings: precisions and shardings of SGLang servers that hash their weights on the device.
    is_quantized: whether some weights are sent quantized; rows and SGLang's checksums are kept of the others.
    sums: by precision and name. fused: by shard and SGLang's name, from `LayoutChecksums.digests`.
    wrong, unhashed: SGLang's tensors that were sent incorrectly, or whose checksum cannot be known, and why.
    unknown_tp_sizes, unknown_ep_sizes: numbers of processes whose shards have no known checksum, and why.
    checksums: the trainer's checksums by its own names; for tensors on a GPU sent to SGLang, by SGLang's names.
    verify_s: seconds spent on checksums.

    Tensors are hashed on the current stream of their device while they are read. `finish` waits for the results.
    """

    dtypes: frozenset[torch.dtype]
    keep_rows: bool
    device_dtypes: frozenset[torch.dtype] = frozenset()
    shardings: frozenset[EngineSharding] = frozenset([UNSHARDED])
    sums: dict[torch.dtype, dict[str, str]] = field(default_factory=dict[torch.dtype, dict[str, str]])
    fused: dict[TensorShard, dict[str, list[str]]] = field(default_factory=dict[TensorShard, dict[str, list[str]]])
    wrong: dict[str, str] = field(default_factory=dict[str, str])
    unhashed: dict[str, str] = field(default_factory=dict[str, str])
    unknown_tp_sizes: dict[int, str] = field(default_factory=dict[int, str])
    unknown_ep_sizes: dict[int, str] = field(default_factory=dict[int, str])
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
            recorder.flush()
            self._recorder, self.is_read = recorder, True

        return WeightSource(read, is_live=source.is_live)

    def finish(self) -> None:
        """Wait for the checksums and fetch them from the device. Idempotent; callable from any thread."""
        with _FINISHING, tracer.span("finish checksums"):
            recorder, self._recorder = self._recorder, None
            if recorder is not None:
                started = time.perf_counter()
                recorder.finish()
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
    """One pass over the weights."""

    def __init__(self, record: WeightRecord, source: WeightSource) -> None:
        self._record = record
        self._layout = None
        if record.device_dtypes:
            self._layout = LayoutChecksums(
                record.device_dtypes,
                record.shardings,
                num_kv_heads=source.num_kv_heads,
                num_experts=source.num_experts,
            )
        self._on_device = Checksums()
        self._of_all, self._of_vectors = _RowSamples(), _RowSamples()

    def add(self, name: str, tensor: Tensor) -> None:
        heartbeat.beat("tensor sent")
        record = self._record
        record.num_tensors += 1
        record.num_bytes += tensor.nbytes
        record.has_head |= name == HEAD
        is_part = record.is_quantized and is_stored_part(name, tensor.dtype)
        layout = None if is_part else self._layout
        if layout is not None:
            layout.add(name, tensor)
        if not tensor.is_cuda or record.dtypes:
            record.checksums[name] = checksum(tensor)
        elif layout is None:
            self._on_device.add(name, [tensor])
        for dtype in record.dtypes:
            is_same = tensor.dtype == dtype or not tensor.is_floating_point()
            record.sums.setdefault(dtype, {})[name] = record.checksums[name] if is_same else checksum(tensor.to(dtype))
        if record.keep_rows and not is_part:
            self._of_all.offer(name, tensor)
            if tensor.ndim == 1:
                self._of_vectors.offer(name, tensor)

    def flush(self) -> None:
        """Launch all reads: the tensors may change afterwards."""
        self._on_device.flush()
        if self._layout is not None:
            self._layout.flush()

    def finish(self) -> None:
        """Wait for the device and store its results in the record."""
        record, layout = self._record, self._layout
        record.checksums |= self._on_device.digests()
        if layout is not None:
            record.fused, record.wrong, record.unhashed = layout.digests(), layout.wrong(), layout.unhashed()
            record.unknown_tp_sizes, record.unknown_ep_sizes = layout.unknown_tp_sizes, layout.unknown_ep_sizes
            if len(record.checksums) < record.num_tensors:
                record.checksums |= {name: digests[0] for name, digests in record.fused[WHOLE].items()}
        record.rows = {name: rows.cpu() for name, rows in (self._of_all.rows | self._of_vectors.rows).items()}
