"""Decoder layers on a GPU: compiled, and with as little recomputation as the memory allows.

Compiling fuses what is between matrix products (norms, rotary embedding, SwiGLU, residual sums), and keeps for the
backward pass only what is expensive to make again. One compiled layer serves all of them, for any number of tokens.

What it keeps can still be too much for long micro-batches. The largest part by far is the two intermediate rows of the
MLP, so in as many layers as needed these are made again in the backward pass; how many is decided before each forward
pass, by the free memory. The decision changes no result.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch._functorch.config  # has to be imported by name
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from furlong.models.packed_layout import PackedLayout
from furlong.models.working_memory import BACKWARD_ROWS, HEADROOM_FRAC

logger = logging.getLogger(__name__)

# Rows of the MLP's intermediate width that a layer keeps for each token: gate and up; the product too if not compiled.
COMPILED_ROWS, EAGER_ROWS = 2, 4
MAX_VARIANTS = 32


def dense_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, if each has a gated MLP of three linear maps; else none."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    is_dense = all(
        isinstance(getattr(getattr(layer, "mlp", None), name, None), nn.Linear)
        for layer in layers
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    return list(layers) if is_dense else []


class MlpRecompute:
    """How many MLPs of a stack of layers are made again in the backward pass, by the free memory.

    mlps: what has `is_recomputed`, one for each layer; row_bytes: of the MLP's intermediate width on this rank;
    compiled: whether the layers are.
    """

    def __init__(self, mlps: Sequence[Any], *, row_bytes: int, compiled: bool) -> None:
        self.mlps, self.row_bytes, self.is_compiled = mlps, row_bytes, compiled
        self.saved_by_recomputing = (COMPILED_ROWS if compiled else EAGER_ROWS) * row_bytes
        self.kept_per_token = 0.0
        self.num_recomputed = 0
        self.headroom_frac = HEADROOM_FRAC

    @contextmanager
    def choose(
        self, device: torch.device, num_tokens: int, *, pending_bytes: int = 0, head_bytes: int = 0, passes: int = 1
    ) -> Generator[None]:
        """Choose for the forward pass that runs inside, with a gradient on a GPU.

        `pending_bytes` will be allocated and stay, `head_bytes` are needed between forward and backward pass; `passes`
        will be done before the first backward pass, this one included.
        """
        if not self.mlps or not torch.is_grad_enabled() or device.type != "cuda":
            yield
            return
        free = (_free_bytes(device, self.headroom_frac) - pending_bytes) // passes
        self.num_recomputed = self._choose(num_tokens, free, head_bytes)
        for i, mlp in enumerate(self.mlps):
            mlp.is_recomputed = i < self.num_recomputed
        before = torch.cuda.memory_allocated(device)
        with _keeping_little():
            yield
        grown = torch.cuda.memory_allocated(device) - before
        if grown > 0:  # else something older was freed in it, and nothing is known
            self.kept_per_token = grown / num_tokens + self.num_recomputed * self.saved_by_recomputing

    def save_memory(self) -> bool:
        """Leave twice as much memory free in the next passes; False if that can save nothing more.

        So it is when all MLPs were recomputed, and when all of the memory was to be left free: what did not fit then
        came before the layers.
        """
        if self.num_recomputed == len(self.mlps) or self.headroom_frac >= 1:
            return False
        self.headroom_frac *= 2
        return True

    def _choose(self, num_tokens: int, free: int, head_bytes: int) -> int:
        """How many MLPs to recompute: all in the first pass, which measures what a token keeps."""
        if not self.kept_per_token:
            return len(self.mlps)
        working = BACKWARD_ROWS * self.row_bytes * num_tokens
        excess = self.kept_per_token * num_tokens + max(working, head_bytes) - free
        return min(len(self.mlps), max(0, -int(-excess // (self.saved_by_recomputing * num_tokens))))


class LayerStack(MlpRecompute):
    """The dense decoder layers of a model: compiled if asked for, with MLPs that can be recomputed.

    `compute_dtype`: of activations, where parameters are stored in another.
    """

    def __init__(self, model: PreTrainedModel, *, compiled: bool, compute_dtype: torch.dtype | None = None) -> None:
        self.layers = dense_layers(model)
        if compiled and not self.layers:
            logger.info("%s: its layers are not compiled, they are not dense", type(model).__name__)
        mlps: list[Any] = [layer.mlp for layer in self.layers]
        for mlp in mlps:
            mlp.__class__ = _recomputable(type(mlp))
        row_bytes = 0
        if mlps:
            weight: Tensor = mlps[0].gate_proj.weight
            row_bytes = len(weight) * (compute_dtype or weight.dtype).itemsize
        super().__init__(mlps, row_bytes=row_bytes, compiled=compiled and bool(mlps))
        if self.is_compiled:
            allow_variants()
            for layer in self.layers:
                _compile(layer)

    @contextmanager
    def forward(
        self, layout: PackedLayout, num_tokens: int, *, pending_bytes: int = 0, head_bytes: int = 0
    ) -> Generator[None]:
        """Choose the layers that recompute their MLP in the pass that runs inside; the byte counts are `choose`'s."""
        if self.is_compiled:
            for offsets in (layout.cu_seqlens_S1, layout.cu_host_S1):
                torch._dynamo.maybe_mark_dynamic(offsets, 0)  # pyright: ignore[reportPrivateUsage]  documented
        device = self.mlps[0].gate_proj.weight.device if self.mlps else torch.device("cpu")
        with self.choose(device, num_tokens, pending_bytes=pending_bytes, head_bytes=head_bytes):
            yield


def allow_variants() -> None:
    """Let the compiler make enough variants of a layer.

    One for each kind of attention, with and without gradient, with and without recomputation.
    """
    dynamo: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]  the documented place of the limit
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)


def _compile(layer: Any) -> None:
    """Compile a layer; of one whose hooks gather its parameters (FSDP2), what runs between them."""
    if layer._forward_pre_hooks:  # where torch keeps them
        layer.forward = torch.compile(layer.forward, dynamic=True)
    else:
        layer.compile(dynamic=True)


@contextmanager
def _keeping_little() -> Generator[None]:
    """Have layers that are compiled inside keep the results of matrix products and attention, and nothing else.

    By default the compiler also keeps what a matrix product of the backward pass reads, such as the normed input of a
    projection and the product inside SwiGLU: half as much again. Making those is one pass over memory.
    """
    config: Any = torch._functorch.config  # pyright: ignore[reportPrivateUsage]  where the compiler's settings are
    wanted = {"ban_recompute_materialized_backward": False}
    if hasattr(config, "is_non_builtin_to_include"):  # attention is not built in: without this it would be run again
        wanted |= {"ban_recompute_not_in_allowlist": False, "is_non_builtin_to_include": True}
    with config.patch(wanted):
        yield


def _free_bytes(device: torch.device, headroom_frac: float) -> int:
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached - int(headroom_frac * total)


@cache
def _recomputable(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of an MLP whose forward is checkpointed while `is_recomputed` is set."""
    if hasattr(kind, "is_recomputed"):
        return kind
    plain = kind.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.is_recomputed and torch.is_grad_enabled():
            return checkpoint(plain, self, x, use_reentrant=False, preserve_rng_state=False)
        return plain(self, x)

    return type(kind.__name__, (kind,), {"forward": forward, "is_recomputed": False})
