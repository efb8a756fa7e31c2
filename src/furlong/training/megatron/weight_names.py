"""Convert between Megatron-core's parameters and tensors of a Hugging Face checkpoint, by the rules of `family`.

Loading reads the tensors of one parameter at a time; exporting yields one tensor at a time.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from furlong.errors import CheckpointError
from furlong.models.model_facts import head_width
from furlong.models.stored_tensors import TensorSource
from furlong.models.untrained_tensors import is_untrained
from furlong.models.value_head import is_value_config
from furlong.training.megatron.family import ENDS, VALUE_ENDS, WeightRule, architecture_of, family_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # sent between ranks by index


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model: its name in its model chunk, its place, and its Hugging Face tensors.

    stage: pipeline rank. chunk: model chunk on that rank. expert: index among the experts of its layer; expert_rank:
    expert-parallel rank that has it.
    """

    rule: WeightRule
    ours: str
    theirs: tuple[str, ...]
    stage: int
    chunk: int
    expert: int | None = None
    expert_rank: int | None = None


def parameters(hf: Any, config: Any) -> Iterator[Parameter]:
    """Yield every parameter of the model, in the same order on all ranks."""
    last = config.pipeline_model_parallel_size - 1, (config.virtual_pipeline_model_parallel_size or 1) - 1
    family = family_of(hf.model_type)
    num_experts = family.architecture(hf).num_experts
    experts_per_rank = num_experts // config.expert_model_parallel_size
    for rule in VALUE_ENDS if is_value_config(hf) else ENDS:
        is_head = rule.ours.startswith("output_layer")
        if not (is_head and hf.tie_word_embeddings):
            yield Parameter(rule, rule.ours, rule.theirs, *((0, 0) if rule.ours.startswith("embedding") else last))
    for layer, (stage, chunk, index) in enumerate(layer_places(config)):
        ours, theirs = f"decoder.layers.{index}.", f"model.layers.{layer}."
        for rule in family.layer_rules(hf, layer):
            names = tuple(theirs + name for name in rule.theirs)
            if not rule.of_expert:
                yield Parameter(rule, ours + rule.ours, names, stage, chunk)
                continue
            for expert in range(num_experts):
                owner, number = divmod(expert, experts_per_rank)
                yield Parameter(
                    rule,
                    ours + rule.ours.replace(".N.", f".{number}."),
                    tuple(name.replace(".N.", f".{expert}.") for name in names),
                    stage,
                    chunk,
                    expert,
                    owner,
                )


def layer_places(config: Any) -> list[tuple[int, int, int]]:
    """Return (pipeline stage, model chunk, index within the chunk) of each layer of the whole model."""
    places: dict[int, tuple[int, int, int]] = {}
    for stage in range(config.pipeline_model_parallel_size):
        for chunk in range(config.virtual_pipeline_model_parallel_size or 1):
            vp_stage = None if config.virtual_pipeline_model_parallel_size is None else chunk
            first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)
            for index in range(get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage)):
                places[first + index] = stage, chunk, index
    return [places[layer] for layer in range(config.num_layers)]


def join_tensors(rule: WeightRule, tensors: Sequence[Tensor], hf: Any) -> Tensor:
    """Join a rule's tensors into the whole parameter; for a packed rule, of one expert's row."""
    match rule.join:
        case "one" | "fused_gate_up":
            return tensors[0]
        case "gate_up":
            return torch.cat(list(tensors))
        case "packed":
            return tensors[0].t()
        case "packed_gate_up":
            rows = tensors[0].t()
            return torch.cat([rows[::2], rows[1::2]])
        case "qkv":
            rest = tensors[0].shape[1:]
            parts = [tensor.reshape(hf.num_key_value_heads, -1, *rest) for tensor in tensors]
            return torch.cat(parts, dim=1).reshape(-1, *rest)
        case "gated_qkv":
            queries, *others = tensors
            return join_tensors(replace(rule, join="qkv"), [_swap_gates(queries, hf, of_head=True), *others], hf)
        case "by_key_head":
            rest, heads = tensors[0].shape[1:], hf.linear_num_key_heads
            parts = [
                part.reshape(heads, -1, *rest)
                for tensor, sizes in zip(tensors, _part_sizes(rule, hf), strict=True)
                for part in tensor.split(sizes)
            ]
            return torch.cat(parts, dim=1).reshape(-1, *rest)


def split_tensors(rule: WeightRule, whole: Tensor, hf: Any) -> tuple[Tensor, ...]:
    """Inverse of `join_tensors`."""
    match rule.join:
        case "one" | "fused_gate_up":
            return (whole,)
        case "gate_up":
            return whole.chunk(2)
        case "packed":
            return (whole.t(),)
        case "packed_gate_up":
            return (torch.stack(whole.chunk(2), dim=1).flatten(0, 1).t(),)
        case "qkv":
            rest = whole.shape[1:]
            width, groups = head_width(hf), hf.num_key_value_heads
            parts = whole.reshape(groups, -1, *rest)
            split = parts.split([parts.shape[1] - 2 * width, width, width], dim=1)
            return tuple(part.reshape(-1, *rest) for part in split)
        case "gated_qkv":
            queries, *others = split_tensors(replace(rule, join="qkv"), whole, hf)
            return _swap_gates(queries, hf, of_head=False), *others
        case "by_key_head":
            rest, heads = whole.shape[1:], hf.linear_num_key_heads
            sizes = _part_sizes(rule, hf)
            split = iter(whole.reshape(heads, -1, *rest).split([size // heads for of in sizes for size in of], dim=1))
            return tuple(torch.cat([next(split).reshape(-1, *rest) for _ in of]) for of in sizes)


def _swap_gates(queries: Tensor, hf: Any, *, of_head: bool) -> Tensor:
    """Reorder the rows of queries and their gates: alternating head by head (`of_head`) or group by group."""
    per_group = hf.num_attention_heads // hf.num_key_value_heads
    axes = (per_group, 2) if of_head else (2, per_group)
    rows = queries.reshape(hf.num_key_value_heads, *axes, head_width(hf), *queries.shape[1:])
    return rows.transpose(1, 2).reshape(queries.shape)


def _part_sizes(rule: WeightRule, hf: Any) -> list[list[int]]:
    return [[math.prod(getattr(hf, field) for field in part) for part in tensor] for tensor in rule.parts]


def read(parameter: Parameter, read_tensor: Callable[[str], Tensor], hf: Any) -> Tensor:
    """Read a whole parameter; `read_tensor` reads a tensor of the Hugging Face checkpoint by name."""
    tensors = [read_tensor(name) for name in parameter.theirs]
    if parameter.rule.is_packed:
        tensors = [tensor[parameter.expert] for tensor in tensors]
    return join_tensors(parameter.rule, tensors, hf)


def hf_tensors(wholes: Iterable[tuple[Parameter, Tensor]], hf: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face tensors from whole parameters in the order of `parameters`."""
    last = architecture_of(hf).num_experts - 1
    packed: Tensor | None = None
    for parameter, whole in wholes:
        parts = split_tensors(parameter.rule, whole, hf)
        if not parameter.rule.is_packed:
            yield from zip(parameter.theirs, parts, strict=True)
            continue
        if packed is None:
            packed = whole.new_empty((last + 1, *parts[0].shape))
        packed[parameter.expert] = parts[0]
        if parameter.expert == last:
            yield parameter.theirs[0], packed
            packed = None


def local_shard(rule: WeightRule, whole: Tensor) -> Tensor:
    """Return this rank's shard of a parameter."""
    group = _tensor_group(rule)
    if rule.axis is None or group.size() == 1:
        return whole
    if rule.has_halves:
        return torch.cat([half.chunk(group.size())[group.rank()] for half in whole.chunk(2)])
    return whole.chunk(group.size(), dim=rule.axis)[group.rank()]


def join_shards(rule: WeightRule, shards: Sequence[Tensor]) -> Tensor:
    """Inverse of `local_shard`, from the shards of all ranks."""
    if rule.axis is None or len(shards) == 1:
        return shards[0]
    if rule.has_halves:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards), dim=rule.axis)


@torch.no_grad()
def _copy(target: Tensor, shard: Tensor) -> None:
    target.copy_(shard)


def load(
    chunks: Sequence[GPTModel], hf: Any, stored: TensorSource, *, put: Callable[[Tensor, Tensor], None] = _copy
) -> None:
    """Load this rank's model chunks from a Hugging Face checkpoint; `put` receives each parameter and its shard.

    Raises CheckpointError for tensors without a rule or with another shape.
    """
    local = local_tensors(chunks)
    missing = set(local)
    check_names(hf, chunks[0].config, stored)
    read_tensor = lru_cache(maxsize=1)(stored.read)  # the experts of a packed tensor are read one after another
    for parameter, target in parameters_with_local(chunks, hf):
        if target is None:
            continue
        missing.discard((parameter.chunk, parameter.ours))
        whole = read(parameter, read_tensor, hf)
        shard = local_shard(parameter.rule, whole)
        if shard.shape != target.shape:
            raise CheckpointError(
                f"{' + '.join(parameter.theirs)} has shape {tuple(whole.shape)}, {tuple(shard.shape)} on each rank; "
                f"the model's {parameter.ours} has {tuple(target.shape)}: config.json and weights are of different "
                "models; use a folder where both match"
            )
        put(target, shard)
    head = len(chunks) - 1, "output_layer.weight"
    if hf.tie_word_embeddings and head in missing:  # the last stage has a copy of the embedding
        put(local[head], local_shard(ENDS[0], stored.read("model.embed_tokens.weight")))
        missing.discard(head)
    if missing:
        names = ", ".join(sorted(name for _, name in missing)[:4])
        raise CheckpointError(f"no weight rule of {hf.model_type} fills {names}; this is a bug in furlong, report it")


def check_names(hf: Any, config: Any, stored: TensorSource) -> None:
    """Raise CheckpointError if the checkpoint has tensors without a rule, which would be silently dropped."""
    known = {name for parameter in parameters(hf, config) for name in parameter.theirs}
    unknown = {name for name in stored.names - known if not name.endswith("rotary_emb.inv_freq")}
    unknown = {name for name in unknown if not is_untrained(name, hf)}
    if hf.tie_word_embeddings:
        unknown.discard("lm_head.weight")
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {len(unknown)} tensors that --train-backend megatron does not load for "
            f"{hf.model_type}, such as {', '.join(sorted(unknown)[:3])}; use --train-backend fsdp"
        )


def export(
    chunks: Sequence[GPTModel], hf: Any, *, value_of: Callable[[Tensor], Tensor] = torch.detach
) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole tensor under its Hugging Face name, on every rank. A collective: iterate it to its end.

    `value_of` maps a parameter of this rank to the tensor of its shape that is exported, such as a moment.
    """

    def gathered() -> Iterator[tuple[Parameter, Tensor]]:
        for parameter, local in parameters_with_local(chunks, hf):
            whole: Tensor | None = None
            if local is not None:
                shard = value_of(local)
                shards, group = [shard], _tensor_group(parameter.rule)
                if parameter.rule.axis is not None and group.size() > 1:
                    shards = [torch.empty_like(shard) for _ in range(group.size())]
                    dist.all_gather(shards, shard.contiguous(), group=group)
                whole = join_shards(parameter.rule, shards)
            yield parameter, _to_all(whole, parameter, chunks[0])

    yield from hf_tensors(gathered(), hf)


def checkpoint_tensors(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model chunk that checkpoints contain: parameters, and the routers' expert biases."""
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))


def local_tensors(chunks: Sequence[GPTModel]) -> dict[tuple[int, str], Tensor]:
    """Return the `checkpoint_tensors` of this rank by chunk number and name."""
    return {(number, name): tensor for number, chunk in enumerate(chunks) for name, tensor in checkpoint_tensors(chunk)}


def _tensor_group(rule: WeightRule) -> Any:
    if rule.of_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _is_local(parameter: Parameter) -> bool:
    if parameter.stage != parallel_state.get_pipeline_model_parallel_rank():
        return False
    owner = parameter.expert_rank
    return owner is None or owner == parallel_state.get_expert_model_parallel_rank()


def _to_all(whole: Tensor | None, parameter: Parameter, model: GPTModel) -> Tensor:
    """Broadcast a tensor from the ranks that have it: over the expert-parallel group, then over the pipeline."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if parameter.expert_rank is not None and stage == parameter.stage:
        whole = _broadcast(whole, parallel_state.get_expert_model_parallel_group(), parameter.expert_rank, model)
    whole = _broadcast(whole, parallel_state.get_pipeline_model_parallel_group(), parameter.stage, model)
    assert whole is not None
    return whole


def _broadcast(tensor: Tensor | None, group: Any, source: int, model: GPTModel) -> Tensor | None:
    """Broadcast a tensor, whose shape and dtype the other ranks do not know, from member `source` of the group."""
    if group.size() == 1:
        return tensor
    like = next(model.parameters())
    root = dist.get_global_rank(group, source)
    header = torch.zeros(5, dtype=torch.int64, device=like.device)
    if tensor is not None:
        header[: tensor.dim() + 1] = torch.tensor([DTYPES.index(tensor.dtype), *tensor.shape])
    dist.broadcast(header, root, group=group)
    if tensor is None:
        dtype, *shape = header.tolist()
        tensor = torch.empty([size for size in shape if size], dtype=DTYPES[dtype], device=like.device)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, root, group=group)
    return tensor


def parameters_with_local(chunks: Sequence[GPTModel], hf: Any) -> Iterator[tuple[Parameter, Tensor | None]]:
    """Yield every parameter of the whole model, with this rank's shard of it or None."""
    local = local_tensors(chunks)
    for parameter in parameters(hf, chunks[0].config):
        yield parameter, local[parameter.chunk, parameter.ours] if _is_local(parameter) else None
