"""Sharding of a model over several ranks with PyTorch FSDP2.

Each decoder layer is one FSDP unit, all-gathered when it runs. Embedding, final norm and head form another, gathered
once per micro-batch. Gradients are summed over ranks, not averaged: token weights contain the denominator of the step.

Each rank stores a slice of each parameter's first dimension. A model trained in bfloat16 is stored in float32, gathered
in bfloat16, and its gradients are reduced in float32, after every micro-batch. Reducing only after the last micro-batch
would save communication, but needs 4 bytes per parameter on every rank, the memory that sharding is meant to save.

With one rank nothing is sharded, and the functions return their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from furlong.errors import ConfigError, TrainerError
from furlong.models import hf_model as hf
from furlong.models.context_parallel import ContextParallel, all_gather
from furlong.models.packed_model import PackedModel
from furlong.training.ranks import Ranks

Prepare = Callable[[PreTrainedModel], None]
Pack = Callable[[PreTrainedModel], PackedModel]


class Sharding:
    """Placement of the parameters of a run's models on its ranks.

    Raises ConfigError if the parallel sizes do not divide the number of ranks, or differ from the process group.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.index, self.count = 0, 1
        self.uncast: frozenset[str] = frozenset()  # parameters that are not cast to the compute dtype
        self.mesh: Any = None
        self.group: Any = None
        self.context: ContextParallel | None = None  # context-parallel group of this rank
        world, replicate = ranks.world_size, ranks.replicate
        joined = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if joined != world:
            raise ConfigError(
                f"the process group has {joined} ranks, but the trainer is configured for {world}; they must be equal"
            )
        if world % replicate or world % ranks.context:
            raise ConfigError(
                f"{world} trainer ranks cannot be divided by --dp-replicate-size {replicate} and "
                f"--context-parallel-size {ranks.context}; both must divide the number of ranks"
            )
        if world == 1:
            return
        if replicate == 1:
            self.mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        else:
            shape, names = (replicate, world // replicate), ("replicate", "shard")
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.group = self.mesh.get_group("shard")
        self.index, self.count = self.mesh.get_local_rank("shard"), world // replicate
        if ranks.context > 1:
            shape = (ranks.num_data, ranks.context)
            across = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
            self.context = ContextParallel.of(across.get_group("context"))

    @property
    def is_sharded(self) -> bool:
        """Whether there are several ranks."""
        return self.mesh is not None

    def rows(self, length: int) -> slice:
        """Return this rank's slice of a first dimension of `length`."""
        size = -(-length // self.count)
        start = min(self.index * size, length)
        return slice(start, min(start + size, length))

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a tensor, sharing its memory."""
        tensor = tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def full(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the full tensor in `dtype` on every rank's device. A collective if the tensor is sharded."""
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return tensor if dtype is None else tensor.to(dtype)
        return self.gather(tensor.to_local(), tensor.shape, dtype=dtype)

    def gather(self, part: Tensor, shape: torch.Size, *, dtype: torch.dtype | None = None) -> Tensor:
        """All-gather the ranks' slices along the first dimension; `shape` is that of the result. A collective."""
        if not self.is_sharded:
            return part if dtype is None else part.to(dtype)
        part = part.detach().to(self.device, dtype or part.dtype)
        size = -(-shape[0] // self.count)
        padded = part
        if len(part) < size:
            padded = part.new_zeros((size, *shape[1:]))
            padded[: len(part)] = part
        return all_gather(padded, self.group)[: shape[0]]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the shards of one replica, in place. A collective."""
        if self.is_sharded:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def load(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        is_trained: bool,
        prepare: Prepare,
        pack: Pack,
        read: Callable[..., PreTrainedModel] = hf.load_model,
    ) -> PackedModel:
        """Load a Hugging Face folder to compute in `dtype`; rank 0 reads the weights, with `read`. A collective.

        `prepare` is called before sharding, `pack` wraps the model. If sharded, a model that `is_trained` is stored in
        at least float32. Raises what `hf.load_model` raises, and TrainerError on the other ranks.
        """
        if not self.is_sharded:
            model = read(folder, dtype=dtype, device=self.device).eval()
            prepare(model)
            return pack(model)
        source = None
        with self.ranks.agreed(TrainerError):
            if self.ranks.rank == 0:
                source = read(folder, dtype=dtype)
        uncast = [] if source is None else [name for name, p in source.named_parameters() if p.dtype != dtype]
        self.uncast = frozenset(self.ranks.share(uncast))
        packed = self.build(folder, dtype=dtype, is_trained=is_trained, prepare=prepare, pack=pack)
        self._fill(packed.model, source)
        return packed

    def build(self, folder: Path, *, dtype: torch.dtype, is_trained: bool, prepare: Prepare, pack: Pack) -> PackedModel:
        """Build the sharded model of a folder with uninitialized memory.

        Raises ConfigError for a model without a list of layers.
        """
        stored = torch.promote_types(dtype, torch.float32) if is_trained or self.uncast else dtype
        model = hf.build_empty(folder, dtype=stored).eval()
        layers = getattr(model.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ConfigError(
                f"{type(model).__name__} has no list of decoder layers, so it cannot be sharded; train it on one rank"
            )
        prepare(model)
        for owner in {model.get_submodule(name.rpartition(".")[0]) for name in self.uncast}:
            self._unit(owner, stored, stored)
        for layer in layers:
            self._unit(layer, stored, dtype)
        packed = pack(model)
        # Gathered in the forward pass for the embedding; still used at its end and in the backward pass for the head.
        self._unit(packed, stored, dtype, reshard=False)
        for module in packed.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        packed.to_empty(device=self.device)
        return packed

    def _unit(self, module: nn.Module, stored: torch.dtype, compute: torch.dtype, *, reshard: bool = True) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute == stored else compute, reduce_dtype=stored, cast_forward_inputs=False
        )
        fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=reshard)

    def _fill(self, model: PreTrainedModel, source: PreTrainedModel | None) -> None:
        sources = dict(tensors_of(source)) if source is not None else {}
        dtypes = self.ranks.share({name: str(t.dtype).removeprefix("torch.") for name, t in sources.items()})
        for name, tensor in list(tensors_of(model)):
            whole = torch.empty(tensor.shape, dtype=getattr(torch, dtypes[name]), device=self.device)
            if self.ranks.rank == 0:
                whole.copy_(sources[name].detach())
            dist.broadcast(whole, 0)
            _put(model, name, tensor, whole[self.rows(len(whole))] if isinstance(tensor, DTensor) else whole)

    def copy(self, origin: PreTrainedModel, target: PreTrainedModel) -> None:
        """Make `target` equal to `origin`, a model of the same architecture. Each rank copies its shard."""
        sources = dict(tensors_of(origin))
        for name, tensor in list(tensors_of(target)):
            _put(target, name, tensor, self.local(sources[name]))

    def working_bytes(self, packed: PackedModel, compute_dtype: torch.dtype) -> int:
        """Return the bytes that a forward and backward pass needs for gathered layers and gradients in reduction."""
        if not self.is_sharded:
            return 0
        layers: Any = getattr(packed.model.base_model, "layers", ())
        size = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)
        # two gathered layers, and one layer's gradients in both dtypes, float32 twice: one copy is being reduced
        return size * (3 * compute_dtype.itemsize + 2 * 4)


def reshard(packed: PackedModel) -> None:
    """Free the gathered parameters of the root unit, which a pass without gradient leaves allocated."""
    if isinstance(packed, FSDPModule):
        packed.reshard()


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a model: parameters, buffers, and plain attributes of its modules."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for owner, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{owner}.{attribute}".removeprefix("."), value


@torch.no_grad()
def _put(model: PreTrainedModel, name: str, tensor: Tensor, part: Tensor) -> None:
    """Copy this rank's part into a tensor. A plain attribute that is still on the meta device is replaced."""
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(part)
    elif tensor.is_meta:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, part.clone())
    else:
        tensor.copy_(part)
