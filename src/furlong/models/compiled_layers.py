"""Compile decoder layers on a GPU, with as little recomputation as memory allows.

Compilation fuses the operations between GEMMs (norms, rotary embedding, SwiGLU, residual sums) and keeps only
activations that are expensive to recompute. One compiled layer serves all layers and any number of tokens.

For long micro-batches the kept activations can still be too large. The largest are the MLP's two intermediate rows, so
as many layers as needed recompute these in the backward pass. The number is chosen before each forward pass by the free
memory; it does not change results.
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

from furlong.models.model_facts import BACKWARD_ROWS, HEADROOM_FRAC
from furlong.models.packed_layout import PackedLayout

logger = logging.getLogger(__name__)

# Rows of the MLP's intermediate width kept per token and layer: gate and up; in eager mode also their product.
COMPILED_ROWS, EAGER_ROWS = 2, 4
MAX_VARIANTS = 32


def dense_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers if each has a gated MLP of three linear layers, otherwise []."""
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
    """Chooses by free memory how many MLPs of a stack of layers are recomputed in the backward pass.

    mlps: modules with `is_recomputed`, one per layer. row_bytes: of the MLP's intermediate width on this rank, per
    token. compiled: whether the layers are compiled.
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
        """Choose for the forward pass within the context, if it has gradients and runs on a GPU.

        pending_bytes: will be allocated and stay. head_bytes: needed between forward and backward pass. passes: forward
        passes before the first backward pass, including this one.
        """
        if not self.mlps or not torch.is_grad_enabled() or device.type != "cuda":
            yield
            return
        free = (_free_bytes(device, self.headroom_frac) - pending_bytes) // passes
        self.num_recomputed = self._choose(num_tokens, free, head_bytes)
        for i, mlp in enumerate(self.mlps):
            mlp.is_recomputed = i < self.num_recomputed
        before = torch.cuda.memory_allocated(device)
        with _save_gemm_outputs_only():
            yield
        grown = torch.cuda.memory_allocated(device) - before
        if grown > 0:  # otherwise older memory was freed in it, and the measurement is void
            self.kept_per_token = grown / num_tokens + self.num_recomputed * self.saved_by_recomputing

    def save_memory(self) -> bool:
        """Double the memory left free in the next passes; returns False if that cannot help.

        It cannot if all MLPs were recomputed, or if all memory was to be left free: then the allocation that failed
        came before the layers.
        """
        if self.num_recomputed == len(self.mlps) or self.headroom_frac >= 1:
            return False
        self.headroom_frac *= 2
        return True

    def _choose(self, num_tokens: int, free: int, head_bytes: int) -> int:
        """Return the number of MLPs to recompute: all in the first pass, which measures the bytes kept per token."""
        if not self.kept_per_token:
            return len(self.mlps)
        working = BACKWARD_ROWS * self.row_bytes * num_tokens
        excess = self.kept_per_token * num_tokens + max(working, head_bytes) - free
        return min(len(self.mlps), max(0, -int(-excess // (self.saved_by_recomputing * num_tokens))))


class LayerStack(MlpRecompute):
    """The dense decoder layers of a model, optionally compiled, with MLPs that can be recomputed.

    compute_dtype: of activations, if parameters are stored in another dtype.
    """

    def __init__(self, model: PreTrainedModel, *, compiled: bool, compute_dtype: torch.dtype | None = None) -> None:
        self.layers = dense_layers(model)
        if compiled and not self.layers:
            logger.info("%s: layers are not compiled because they are not dense", type(model).__name__)
        mlps: list[Any] = [layer.mlp for layer in self.layers]
        for mlp in mlps:
            mlp.__class__ = _recomputable(type(mlp))
        row_bytes = 0
        if mlps:
            weight: Tensor = mlps[0].gate_proj.weight
            row_bytes = len(weight) * (compute_dtype or weight.dtype).itemsize
        super().__init__(mlps, row_bytes=row_bytes, compiled=compiled and bool(mlps))
        if self.is_compiled:
            set_compiler_options()
            for layer in self.layers:
                _compile(layer)

    @contextmanager
    def forward(
        self, layout: PackedLayout, num_tokens: int, *, pending_bytes: int = 0, head_bytes: int = 0
    ) -> Generator[None]:
        """Choose the layers that recompute their MLP in the forward pass within the context; arguments of `choose`."""
        if self.is_compiled:
            for offsets in (layout.cu_seqlens_S1, layout.cu_host_S1):
                torch._dynamo.maybe_mark_dynamic(offsets, 0)  # pyright: ignore[reportPrivateUsage]  documented
        device = self.mlps[0].gate_proj.weight.device if self.mlps else torch.device("cpu")
        with self.choose(device, num_tokens, pending_bytes=pending_bytes, head_bytes=head_bytes):
            yield


def set_compiler_options() -> None:
    """Allow `MAX_VARIANTS` of a layer, and keep its sizes constant in sharded models, too.

    There is a variant for each kind of attention, with and without gradient, with and without recomputation.
    """
    dynamo: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]  the documented place of options
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
    # Otherwise a module that FSDP2 manages has symbolic integers for attributes (in_features, head_dim), which takes
    # three times as long to trace as constants, and kernels compute with sizes that they do not know.
    dynamo.skip_fsdp_guards = False


def _compile(layer: Any) -> None:
    """Compile a layer; with FSDP2 hooks, which gather its parameters, only the forward between them."""
    if layer._forward_pre_hooks:  # torch has no public accessor
        layer.forward = torch.compile(layer.forward, dynamic=True)
    else:
        layer.compile(dynamic=True)


@contextmanager
def _save_gemm_outputs_only() -> Generator[None]:
    """Make layers compiled within the context keep only the outputs of GEMMs and attention for the backward pass.

    By default the compiler also keeps the inputs of backward GEMMs, such as the normalized input of a projection and
    the product in SwiGLU: half as much again. Recomputing those is one pass over memory.
    """
    config: Any = torch._functorch.config  # pyright: ignore[reportPrivateUsage]  where the compiler's settings are
    options = {"ban_recompute_materialized_backward": False}
    if hasattr(
        config, "is_non_builtin_to_include"
    ):  # attention is not a built-in operator: without this it would be recomputed
        options |= {"ban_recompute_not_in_allowlist": False, "is_non_builtin_to_include": True}
    with config.patch(options):
        yield


def _free_bytes(device: torch.device, headroom_frac: float) -> int:
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached - int(headroom_frac * total)


@cache
def _recomputable(kind: type[nn.Module]) -> type[nn.Module]:
    if hasattr(kind, "is_recomputed"):
        return kind
    plain = kind.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.is_recomputed:  # in this order: without gradient, one variant serves both
            return checkpoint(plain, self, x, use_reentrant=False, preserve_rng_state=False)
        return plain(self, x)

    return type(kind.__name__, (kind,), {"forward": forward, "is_recomputed": False})
