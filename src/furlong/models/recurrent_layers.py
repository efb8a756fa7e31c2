"""Gated delta nets (Qwen3-Next, Qwen3.5; arXiv:2412.06464) over packed sequences.

Such a layer has a causal convolution and a recurrent state, which would leak from a sequence into the next one of the
row. Here it runs sequences as a batch instead, each from an empty state: rows are padded on the right to the longest of
their bucket, which changes nothing before the padding. So the family's own kernels are used: PyTorch's on a CPU, those
of flash-linear-attention on CUDA if transformers finds them. Prompts that samples share run once for each sample.

Legend: U tokens that are run, P positions of the sequences, S sequences of a bucket, L padded length, D width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from furlong.errors import TrainerError
from furlong.models.model_facts import delta_nets
from furlong.models.packed_attention import pad_rows, unpad_rows
from furlong.models.packed_layout import PackedLayout, bucket_lengths


def pack_delta_nets(model: nn.Module) -> None:
    """Let the gated delta nets of `model` run packed sequences, as its `packed` argument describes."""
    for module in delta_nets(model):
        module.__class__ = _packed(type(module))


@cache
def _packed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a gated delta net whose forward receives a packed row."""
    plain: Any = kind.forward

    @torch.compiler.disable  # shapes differ in every micro-batch
    def forward(
        self: Any, hidden_states: Tensor, *args: Any, packed: PackedLayout | None = None, **options: Any
    ) -> Any:
        if packed is None or hidden_states.shape[0] != 1:
            raise TrainerError(
                f"{kind.__name__} received no layout of the packed sequences, so their states would mix; this is a bug "
                "in furlong, or the installed transformers no longer passes arguments to this layer: report it"
            )
        rows_PD = pad_rows(hidden_states[0], packed)
        parts: list[Tensor] = []
        if packed.buckets:
            start = 0
            for count, width in packed.buckets:
                batch_SLD = rows_PD[start : start + count * width].unflatten(0, (count, width))
                parts.append(plain(self, batch_SLD, *args, **options).flatten(0, 1))
                start += count * width
        else:
            lengths = packed.cu_host_S1.diff().numpy().astype(np.int64)
            sequences = rows_PD.split(lengths.tolist())
            order, buckets = bucket_lengths(lengths)
            outputs: dict[int, Tensor] = {}
            for count, _ in buckets:
                numbers, order = order[:count].tolist(), order[count:]
                batch_SLD = plain(self, pad_sequence([sequences[i] for i in numbers], True), *args, **options)
                outputs |= {i: rows[: lengths[i]] for i, rows in zip(numbers, batch_SLD, strict=True)}
            parts = [outputs[i] for i in range(len(lengths))]
        return unpad_rows(torch.cat(parts), packed)[None]

    return type(kind.__name__, (kind,), {"forward": forward})
