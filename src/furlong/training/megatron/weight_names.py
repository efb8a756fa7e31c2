"""Megatron-core's parameters and those of a Hugging Face checkpoint, by the rules of `rules`, in both directions.

Loading reads the tensors of one parameter at a time, and exporting gives one tensor at a time.
"""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from furlong.errors import CheckpointError
from furlong.models.stored_tensors import Stored
from furlong.training.megatron.family import architecture_of, family_of
from furlong.training.megatron.weight_rules import ENDS, WeightRule

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by number, where a tensor is sent


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model: its name in the part that has it, where that is, and what it is made of.

    stage, chunk: which pipeline rank has it, in which of its parts of the model. expert: which of its layer's experts
    it is of; expert_rank: which of the ranks that share the experts has that one.
    """

    rule: WeightRule
    ours: str
    theirs: tuple[str, ...]
    stage: int
    chunk: int
    expert: int | None = None
    expert_rank: int | None = None


def parameters(hf: Any, config: Any) -> Iterator[Parameter]:
    """Every parameter of the model, in the same order on all ranks."""
    last = config.pipeline_model_parallel_size - 1, (config.virtual_pipeline_model_parallel_size or 1) - 1
    family = family_of(hf.model_type)
    num_experts = family.architecture(hf).num_experts
    local = num_experts // config.expert_model_parallel_size
    for rule in ENDS:
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
                owner, number = divmod(expert, local)
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
    """Of each layer of the whole model: its pipeline rank, which part of the model there, and its number in that."""
    found: dict[int, tuple[int, int, int]] = {}
    for stage in range(config.pipeline_model_parallel_size):
        for chunk in range(config.virtual_pipeline_model_parallel_size or 1):
            where = {
                "vp_stage": None if config.virtual_pipeline_model_parallel_size is None else chunk,
                "pp_rank": stage,
            }
            first = get_transformer_layer_offset(config, **where)
            for index in range(get_num_layers_to_build(config, **where)):
                found[first + index] = stage, chunk, index
    return [found[layer] for layer in range(config.num_layers)]


@dataclass(frozen=True)
class Heads:
    """Attention heads: of queries, of keys and values, and their width."""

    queries: int
    keys: int
    width: int

    @staticmethod
    def of(hf: Any) -> Heads:
        """Those of a Hugging Face config."""
        width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        return Heads(hf.num_attention_heads, hf.num_key_value_heads, width)


def joined(rule: WeightRule, tensors: Sequence[Tensor], heads: Heads) -> Tensor:
    """The whole parameter of a rule's tensors; of a packed one, of the row of one expert."""
    match rule.join:
        case "one":
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
            parts = [tensor.reshape(heads.keys, -1, *rest) for tensor in tensors]
            return torch.cat(parts, dim=1).reshape(-1, *rest)


def parted(rule: WeightRule, whole: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """Inverse of `joined`."""
    match rule.join:
        case "one":
            return (whole,)
        case "gate_up":
            return whole.chunk(2)
        case "packed":
            return (whole.t(),)
        case "packed_gate_up":
            return (torch.stack(whole.chunk(2), dim=1).flatten(0, 1).t(),)
        case "qkv":
            rest = whole.shape[1:]
            group = heads.queries // heads.keys
            parts = whole.reshape(heads.keys, (group + 2) * heads.width, *rest)
            split = parts.split([group * heads.width, heads.width, heads.width], dim=1)
            return tuple(part.reshape(-1, *rest) for part in split)


def read(parameter: Parameter, read_one: Callable[[str], Tensor], heads: Heads) -> Tensor:
    """The whole parameter out of a checkpoint, whose tensors `read_one` reads by their names."""
    tensors = [read_one(name) for name in parameter.theirs]
    if parameter.rule.is_packed:
        tensors = [tensor[parameter.expert] for tensor in tensors]
    return joined(parameter.rule, tensors, heads)


def their_tensors(wholes: Iterable[tuple[Parameter, Tensor]], hf: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint from whole parameters, which come in the order of `parameters`."""
    heads, last = Heads.of(hf), architecture_of(hf).num_experts - 1
    packed: Tensor | None = None
    for parameter, whole in wholes:
        parts = parted(parameter.rule, whole, heads)
        if not parameter.rule.is_packed:
            yield from zip(parameter.theirs, parts, strict=True)
            continue
        if packed is None:
            packed = whole.new_empty((last + 1, *parts[0].shape))
        packed[parameter.expert] = parts[0]
        if parameter.expert == last:
            yield parameter.theirs[0], packed
            packed = None


def cut(rule: WeightRule, whole: Tensor, num_ranks: int, rank: int) -> Tensor:
    """One rank's part of a parameter."""
    if rule.axis is None or num_ranks == 1:
        return whole
    if rule.has_halves:
        return torch.cat([half.chunk(num_ranks)[rank] for half in whole.chunk(2)])
    return whole.chunk(num_ranks, dim=rule.axis)[rank]


def put_together(rule: WeightRule, parts: Sequence[Tensor]) -> Tensor:
    """Inverse of `cut`, from the parts of all ranks."""
    if rule.axis is None or len(parts) == 1:
        return parts[0]
    if rule.has_halves:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(parts), dim=rule.axis)


class LastRead:
    """A checkpoint that keeps the tensor that was read last: the experts of a packed one are read from it in turn."""

    def __init__(self, stored: Stored) -> None:
        self._stored, self._name, self._tensor = stored, "", torch.empty(0)

    def read(self, name: str) -> Tensor:
        """Read a tensor, or give the one that was read last."""
        if name != self._name:
            self._name, self._tensor = name, self._stored.read(name)
        return self._tensor


@torch.no_grad()
def _copy(target: Tensor, part: Tensor) -> None:
    target.copy_(part)


def load(
    chunks: Sequence[GPTModel],
    hf: Any,
    stored: Stored,
    *,
    put: Callable[[Tensor, Tensor], None] = _copy,
) -> None:
    """Fill this rank's parts from a Hugging Face checkpoint. Raises CheckpointError for what has no rule or no fit.

    `put` is given a parameter and this rank's part of what is stored for it.
    """
    mine = named(chunks)
    left = set(mine)
    config = chunks[0].config
    check_all_are_read(hf, config, stored)
    kept = LastRead(stored)
    for parameter in parameters(hf, config):
        key = parameter.chunk, parameter.ours
        if not _is_here(parameter):
            continue
        left.discard(key)
        whole = read(parameter, kept.read, Heads.of(hf))
        part = part_of(parameter.rule, whole)
        target = mine[key]
        if part.shape != target.shape:
            raise CheckpointError(
                f"{' + '.join(parameter.theirs)} is {tuple(whole.shape)}, of which a rank has {tuple(part.shape)}; the "
                f"model's {parameter.ours} is {tuple(target.shape)}. config.json and weights are of different models"
            )
        put(target, part)
    head = len(chunks) - 1, "output_layer.weight"
    if hf.tie_word_embeddings and head in left:  # the last stage has a copy of the embedding
        put(mine[head], part_of(ENDS[0], stored.read("model.embed_tokens.weight")))
        left.discard(head)
    if left:
        unfilled = ", ".join(sorted(name for _, name in left)[:4])
        raise CheckpointError(
            f"no rule of {hf.model_type} fills {unfilled}; this is an error of furlong, not of the checkpoint"
        )


def check_all_are_read(hf: Any, config: Any, stored: Stored) -> None:
    """Raise CheckpointError if the folder has tensors that no rule reads: the model would be another one."""
    known = {name for parameter in parameters(hf, config) for name in parameter.theirs}
    odd = {name for name in stored.names - known if not name.endswith("rotary_emb.inv_freq")}
    if left_out := {name for name in odd if name.startswith(_prefixes_of_mtp(hf))}:
        odd -= left_out
        logger.warning(
            "%d tensors of layers that predict several tokens at once (%s...) are not read: they are not trained, and "
            "folders that are written do not have them",
            len(left_out),
            min(left_out),
        )
    if hf.tie_word_embeddings:
        odd.discard("lm_head.weight")
    if odd:
        raise CheckpointError(
            f"the checkpoint has {len(odd)} tensors that --train-backend megatron does not read for {hf.model_type}, "
            f"such as {', '.join(sorted(odd)[:3])}; use --train-backend fsdp"
        )


def _prefixes_of_mtp(hf: Any) -> tuple[str, ...]:
    """How the names of multi-token prediction begin: it is stored as further layers."""
    first = hf.num_hidden_layers
    return tuple(f"model.layers.{first + number}." for number in range(architecture_of(hf).mtp_layers))


def export(
    chunks: Sequence[GPTModel],
    hf: Any,
    *,
    part_of: Callable[[Tensor], Tensor] = torch.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole tensor under its Hugging Face name, on every rank. A collective: iterate it to its end.

    `part_of` gives what is sent in place of a parameter of this rank, in its shape.
    """
    yield from their_tensors(_wholes(chunks, hf, part_of), hf)


def _wholes(
    chunks: Sequence[GPTModel], hf: Any, part_of: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Parameter, Tensor]]:
    mine = named(chunks)
    for parameter in parameters(hf, chunks[0].config):
        whole: Tensor | None = None
        if _is_here(parameter):
            part = part_of(mine[parameter.chunk, parameter.ours])
            parts, group = [part], _sharers(parameter.rule)
            if parameter.rule.axis is not None and group.size() > 1:
                parts = [torch.empty_like(part) for _ in range(group.size())]
                dist.all_gather(parts, part.contiguous(), group=group)
            whole = put_together(parameter.rule, parts)
        yield parameter, _to_all(whole, parameter, chunks[0])


def tensors_of(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of a part of a model: its parameters, and the biases of routers' choices."""
    yield from chunk.named_parameters()
    yield from ((name, own) for name, own in chunk.named_buffers() if name.endswith(".expert_bias"))


def named(chunks: Sequence[GPTModel]) -> dict[tuple[int, str], Tensor]:
    """What a checkpoint holds of this rank's parts of a model, by number of the part and name."""
    return {(number, name): own for number, chunk in enumerate(chunks) for name, own in tensors_of(chunk)}


def _sharers(rule: WeightRule) -> Any:
    """The ranks that a parameter of this kind is cut over."""
    if rule.of_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def part_of(rule: WeightRule, whole: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    group = _sharers(rule)
    return cut(rule, whole, group.size(), group.rank())


def _is_here(parameter: Parameter) -> bool:
    if parameter.stage != parallel_state.get_pipeline_model_parallel_rank():
        return False
    owner = parameter.expert_rank
    return owner is None or owner == parallel_state.get_expert_model_parallel_rank()


def _to_all(whole: Tensor | None, parameter: Parameter, model: GPTModel) -> Tensor:
    """Send a tensor from the ranks that have it: over the ranks of other experts, then over the pipeline."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if parameter.expert_rank is not None and stage == parameter.stage:
        whole = _broadcast(whole, parallel_state.get_expert_model_parallel_group(), parameter.expert_rank, model)
    whole = _broadcast(whole, parallel_state.get_pipeline_model_parallel_group(), parameter.stage, model)
    assert whole is not None
    return whole


def _broadcast(tensor: Tensor | None, group: Any, source: int, model: GPTModel) -> Tensor | None:
    """Send a tensor, whose shape and dtype the others do not know, from the group's member `source`."""
    if group.size() == 1:
        return tensor
    like = next(model.parameters())
    root = dist.get_global_rank(group, source)
    form = torch.zeros(5, dtype=torch.int64, device=like.device)
    if tensor is not None:
        form[: tensor.dim() + 1] = torch.tensor([DTYPES.index(tensor.dtype), *tensor.shape])
    dist.broadcast(form, root, group=group)
    if tensor is None:
        dtype, *shape = form.tolist()
        tensor = torch.empty([size for size in shape if size], dtype=DTYPES[dtype], device=like.device)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, root, group=group)
    return tensor


def on_this_rank(chunks: Sequence[GPTModel], hf: Any) -> Iterator[tuple[Parameter, Tensor | None]]:
    """Every parameter of the whole model, with what this rank has of it."""
    mine = named(chunks)
    for parameter in parameters(hf, chunks[0].config):
        yield parameter, mine[parameter.chunk, parameter.ours] if _is_here(parameter) else None
