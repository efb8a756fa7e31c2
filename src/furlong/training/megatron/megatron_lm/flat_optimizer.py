"""Masters and moments out of the buffers of a run's distributed optimizer, which Megatron-LM saves by default.

Each rank of that run had its parameters one after the other in a buffer, in the reverse of the order of its modules,
each from the next multiple of 64 on. These buffers are what is stored (dp_reshardable), numbered and not named. Which
parameters a rank had follows from the sizes in `common.pt`; their order from what the layers were built of, which is
not stored: Megatron-core's own modules, or those of TransformerEngine, whose linear layers hold the norms before them,
and whose experts are grouped. It is seen by the content: rounded, masters are the weights, which are in the same folder
under their names. That is asked of every parameter that is read, so a wrong order is an error and no wrong state.
"""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportAttributeAccessIssue=false
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from furlong.errors import CheckpointError, ConfigError
from furlong.training.checkpoint.dist_files import DistFiles, common_of
from furlong.training.checkpoint.dist_optimizer import BUFFER, FRESH, Kind, one_step
from furlong.training.megatron import weight_names as names
from furlong.training.megatron.model_build import transformer_config
from furlong.training.megatron.parallel_layout import Compute, Layout, described
from furlong.training.megatron.weight_names import Parameter

ALIGNMENT = 64  # values, from which each parameter begins
STORED: dict[Kind, str] = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
EXPERT = re.compile(r"mlp\.experts\.local_experts\.\d+\.linear_fc(\d)\.(\w+)")
# The modules of a layer in the order in which Megatron-core builds them.
MODULES = (
    "input_layernorm", "self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "self_attention.kv_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1",
    "mlp.linear_fc2", "mlp.router", "mlp.experts", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2",
)  # fmt: skip
# Which of TransformerEngine's linear layers hold the norm before them, where there are both.
FUSED = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}


class Order(NamedTuple):
    """What layers were built of. fuses: norms are in the linear layers after them; groups: experts are one layer."""

    fuses: bool
    groups: bool


ORDERS = (Order(False, False), Order(True, True), Order(True, False), Order(False, True))


@dataclass(frozen=True)
class Slot:
    """Where a rank's part of a parameter lies: in which buffer, from where on."""

    buffer: str
    start: int
    shape: tuple[int, ...]


class _MisfitError(Exception):
    """Parameters do not fill the buffers."""


Key = tuple[tuple[str, ...], int | None]  # of a parameter in any layout: its tensors, and which expert


class FlatOptimizer:
    """The states of one folder, for the parameters of a model with `hf` as its config.

    trained: names of the tensors that were trained, in a Hugging Face checkpoint. shapes: of whole parameters, by their
    rule. Raises CheckpointError for buffers that other parameters fill.
    """

    def __init__(
        self, files: DistFiles, hf: Any, *, trained: frozenset[str], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self._files, self._hf, self._shapes = files, hf, shapes
        self._buffers = _buffers_of(files)
        self.layout = self._saved_layout()
        self._num_rows = files.shape(EMBEDDING)[0]  # the vocabulary, padded
        try:
            config = transformer_config(hf, self.layout, torch.float32, compute=Compute())
        except ConfigError as error:
            raise CheckpointError(f"{files.folder} was saved by a layout that is not known here: {error}") from error
        self._parameters = [each for each in names.parameters(hf, config) if trained.issuperset(each.theirs)]
        self.dtype = files.dtype(EMBEDDING)
        noted = files.objects("optimizer.distributed.dp_group_idx_0.optimizer")
        self.step = one_step(f"{files.folder}", noted)
        is_tied = hf.tie_word_embeddings and any(each.rule.ours == EMBEDDING for each in self._parameters)
        self._has_copy = is_tied and self.layout.pipeline > 1  # the last stage, of the embedding
        self._slots: dict[tuple[Key, int], Slot] = {}

    def orders(self) -> Iterator[str]:
        """Try one order after the other; yields how each that fills the buffers is called."""
        tried = set[tuple[Any, ...]]()
        for order in ORDERS:
            try:
                slots = dict(self._placed(order))
            except _MisfitError:
                continue
            if (seen := tuple(slots.items())) not in tried:
                tried.add(seen)
                self._slots = slots
                yield "TransformerEngine's modules" if order.fuses else "Megatron-core's modules"
        if not tried:
            raise CheckpointError(
                f"{self._files.folder}: the buffers of its optimizer (dp_reshardable) are not those of this model's "
                f"trained parameters under {described(asdict(self.layout))}: that run trained others, or was built of "
                f"others; have Megatron-LM save it again with --dist-ckpt-optim-fully-reshardable, {FRESH}"
            )

    def read(self, kind: Kind, parameter: Parameter) -> Tensor:
        """Put the master or a moment of a whole parameter together from the parts of that run's ranks."""
        rule = parameter.rule
        sharers = 1 if rule.axis is None else self._sharers(parameter)
        parts = [self._part(kind, self._slots[_key(parameter), rank]) for rank in range(sharers)]
        whole = names.put_together(rule, parts)
        return whole[: self._hf.vocab_size] if rule.ours in (EMBEDDING, HEAD) else whole

    def _part(self, kind: Kind, slot: Slot) -> Tensor:
        flat = self._files.read(f"{slot.buffer}.{STORED[kind]}", (slot.start,), (math.prod(slot.shape),))
        return flat.view(slot.shape)

    def _sharers(self, parameter: Parameter) -> int:
        return self.layout.expert_tensor if parameter.rule.of_expert else self.layout.tensor

    def _saved_layout(self) -> Layout:
        """How the ranks of the run that saved these shared the model."""
        args = common_of(self._files.folder).get("args")
        sizes = {name: None if args is None else args.get(name) for name in SIZES.values()}
        reason = "" if sizes["tensor_model_parallel_size"] else "does not say how its ranks shared the model"
        for name in UNKNOWN:
            reason = f"has {name} {args.get(name)}" if args is not None and args.get(name) else reason
        if reason:
            raise CheckpointError(
                f"{self._files.folder}: common.pt {reason}, so the buffers of its optimizer (dp_reshardable) cannot be "
                f"read; have Megatron-LM save it again with --dist-ckpt-optim-fully-reshardable, {FRESH}"
            )
        found: dict[str, int] = {ours: int(sizes[theirs] or 0) for ours, theirs in SIZES.items() if sizes[theirs]}
        tensor = found["tensor"]
        found.setdefault("expert_tensor", tensor)
        return replace(Layout(sequence_parallel=tensor > 1), **found)

    def _placed(self, order: Order) -> Iterator[tuple[tuple[Key, int], Slot]]:
        """Where the parameters of each of that run's ranks lie, if they were in an order; other ranks have the same."""
        layout = self.layout
        is_chained = any(part for part, _ in self._buffers)  # experts have an optimizer, and buffers, of their own
        for stage in range(layout.pipeline):
            here = [each for each in self._parameters if each.stage == stage]
            dense = [each for each in here if not (each.rule.of_expert and is_chained)]
            for rank in range(layout.tensor):
                yield from self._of_rank(dense, 0, stage * layout.tensor + rank, order, rank)
            if not is_chained:
                continue
            for number in range(layout.expert * layout.expert_tensor):
                owner, rank = divmod(number, layout.expert_tensor)
                experts = [each for each in here if each.rule.of_expert and each.expert_rank == owner]
                group = stage * layout.expert * layout.expert_tensor + number
                if experts:
                    yield from self._of_rank(experts, 1, group, order, rank)

    def _of_rank(
        self, parameters: Sequence[Parameter], part: int, group: int, order: Order, rank: int
    ) -> Iterator[tuple[tuple[Key, int], Slot]]:
        """Of one rank, in one of its optimizers; each part of an interleaved model has a buffer."""
        chunks: dict[int, list[Parameter]] = {}
        for each in parameters:
            chunks.setdefault(each.chunk, []).append(each)
        buffers = self._buffers.get((part, group), [])
        if len(buffers) != len(chunks):
            raise _MisfitError
        last = self.layout.pipeline - 1, self.layout.virtual - 1
        for (chunk, own), buckets in zip(sorted(chunks.items()), buffers, strict=True):
            linear = {each.ours for each in own if ".linear_" in each.ours and not each.rule.of_expert}
            ordered = sorted(own, key=partial(_place, linear=linear, order=order))
            copy = [None] if self._has_copy and not part and (own[0].stage, chunk) == last else []
            yield from self._filled([*ordered, *copy], buckets, rank)

    def _filled(
        self, parameters: Sequence[Parameter | None], buckets: Sequence[tuple[str, int]], rank: int
    ) -> Iterator[tuple[tuple[Key, int], Slot]]:
        """Lay parameters into the buckets of a buffer, from the last to the first. None: a copy of the embedding."""
        number = end = 0
        for each in reversed(parameters):
            shape = self._local_shape(each)
            start, size = -(-end // ALIGNMENT) * ALIGNMENT, math.prod(shape)
            if start + size > buckets[number][1]:
                if buckets[number][1] not in (end, start) or number + 1 == len(buckets):
                    raise _MisfitError
                number, start = number + 1, 0
            end = start + size
            if each is not None:
                yield (_key(each), rank), Slot(buckets[number][0], start, shape)
        if (number, end) != (len(buckets) - 1, buckets[-1][1]):
            raise _MisfitError

    def _local_shape(self, parameter: Parameter | None) -> tuple[int, ...]:
        if parameter is None:
            return self._num_rows // self.layout.tensor, self._shapes[EMBEDDING][1]
        shape, axis = list(self._shapes[parameter.rule.ours]), parameter.rule.axis
        if parameter.rule.ours in (EMBEDDING, HEAD):
            shape[0] = self._num_rows
        if axis is not None:
            shape[axis] //= self._sharers(parameter)
        return tuple(shape)


SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size",
    "first_layers": "decoder_first_pipeline_num_layers",
    "last_layers": "decoder_last_pipeline_num_layers",
}
# Other ways to cut the layers over the pipeline, which are not built here.
UNKNOWN = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _buffers_of(files: DistFiles) -> dict[tuple[int, int], list[list[tuple[str, int]]]]:
    """By optimizer and rank the buffers in their order; of each the buckets, with how many values they have."""
    found: dict[tuple[int, int], dict[int, dict[int, tuple[str, int]]]] = {}
    for name in files.names:
        if (match := BUFFER.fullmatch(name)) and match["kind"] == "param":
            place = int(match["part"] or 0), int(match["group"])
            buckets = found.setdefault(place, {}).setdefault(int(match["buffer"]), {})
            buckets[int(match["bucket"])] = match["prefix"], files.shape(name)[0]
    return {
        place: [[buckets[number] for number in sorted(buckets)] for _, buckets in sorted(buffers.items())]
        for place, buffers in found.items()
    }


def _key(parameter: Parameter) -> Key:
    return parameter.theirs, parameter.expert


def _place(parameter: Parameter, *, linear: Container[str], order: Order) -> tuple[Any, ...]:
    """Where a parameter stands among those of its part of the model; `linear` are the names of its linear layers."""
    if not (found := re.match(r"decoder\.layers\.(\d+)\.(.+)", parameter.ours)):
        return (-1,) if parameter.ours == EMBEDDING else (math.inf, parameter.ours == HEAD)
    layer, name = int(found[1]), found[2]
    module, offset = name.rpartition(".")[0], 0
    if expert := EXPERT.fullmatch(name):
        of_what = int(expert[1]), expert[2] == "bias"
        own_place = (*of_what, parameter.expert) if order.groups else (parameter.expert, *of_what)
        return (layer, MODULES.index("mlp.experts"), 0, *own_place)
    if order.fuses:
        holder = FUSED.get(module)
        if f"decoder.layers.{layer}.{holder}.weight" in linear:
            module, offset = str(holder), -1
    return layer, MODULES.index(module), offset, name.endswith("bias")
