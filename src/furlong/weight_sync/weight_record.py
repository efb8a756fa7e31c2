"""The record that a trainer rank makes of the weights while it sends them, to verify later that they arrived."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

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
    _finishing: Callable[[], None] | None = None

    def recording(self, source: WeightSource) -> WeightSource:
        """Wrap `source` so that everything read from it is recorded."""

        def read() -> Iterator[NamedTensor]:
            layout = None
            if self.device_dtypes:
                facts = {"num_kv_heads": source.num_kv_heads, "num_experts": source.num_experts}
                layout = LayoutChecksums(self.device_dtypes, self.shardings, **facts)
            on_device, of_all, of_vectors = Checksums(), _RowSamples(), _RowSamples()
            for name, tensor in source.open():
                started = time.perf_counter()
                heartbeat.beat("tensor sent")
                self.num_tensors += 1
                self.num_bytes += tensor.nbytes
                self.has_head |= name == HEAD
                is_part = self.is_quantized and is_stored_part(name, tensor.dtype)
                if layout is not None and not is_part:
                    layout.add(name, tensor)
                if not tensor.is_cuda or self.dtypes:
                    self.checksums[name] = checksum(tensor)
                elif layout is None or is_part:
                    on_device.add(name, [tensor])
                for dtype in self.dtypes:
                    is_same = tensor.dtype == dtype or not tensor.is_floating_point()
                    value = self.checksums[name] if is_same else checksum(tensor.to(dtype))
                    self.sums.setdefault(dtype, {})[name] = value
                if self.keep_rows and not is_part:
                    of_all.offer(name, tensor)
                    if tensor.ndim == 1:
                        of_vectors.offer(name, tensor)
                self.verify_s += time.perf_counter() - started
                yield name, tensor
            on_device.flush()  # launch all reads: the tensors may change afterwards
            if layout is not None:
                layout.flush()
            self._finishing = partial(self._finish, on_device, layout, of_all.rows | of_vectors.rows)
            self.is_read = True

        return WeightSource(read, is_live=source.is_live)

    def _finish(self, on_device: Checksums, layout: LayoutChecksums | None, rows: dict[str, Tensor]) -> None:
        self.checksums |= on_device.digests()
        if layout is not None:
            self.fused, self.wrong, self.unhashed = layout.digests(), layout.wrong(), layout.unhashed()
            self.unknown_tp_sizes, self.unknown_ep_sizes = layout.unknown_tp_sizes, layout.unknown_ep_sizes
            if len(self.checksums) < self.num_tensors:
                self.checksums |= {name: digests[0] for name, digests in self.fused[WHOLE].items()}
        self.rows = {name: part.cpu() for name, part in rows.items()}

    def finish(self) -> None:
        """Wait for the checksums and fetch them from the device. Idempotent; callable from any thread."""
        with _FINISHING, tracer.span("finish checksums"):
            finishing, self._finishing = self._finishing, None
            if finishing is not None:
                started = time.perf_counter()
                finishing()
                self.verify_s += time.perf_counter() - started

    @functools.cached_property
    def digest(self) -> str:
        """One checksum over all tensors; available after `finish`."""
        assert self._finishing is None
        lines = [f"{name}{digest}" for name, digest in sorted(self.checksums.items())]
        return xxhash.xxh3_128_hexdigest("".join(lines).encode())

    def expected(self, dtype: torch.dtype, loaded: dict[str, str]) -> dict[str, str]:
        """Return the checksums that an engine of this precision should have; it may keep a tensor's own precision."""
        return {
            name: self.checksums[name] if loaded.get(name) == self.checksums[name] else value
            for name, value in self.sums[dtype].items()
        }
