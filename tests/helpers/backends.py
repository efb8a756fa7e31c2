"""Build training backends for a model folder from flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from furlong.config.sections import CheckpointFlags, MegatronFlags, MoeFlags, OptimFlags, TrainFlags
from furlong.training.fsdp.backend import FsdpBackend
from furlong.training.megatron.moe_routing import LoadBalancing
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.ranks import Ranks
from furlong.training.settings import BackendSettings

if TYPE_CHECKING:
    from furlong.training.megatron.megatron_backend import MegatronBackend

SECTIONS: dict[str, Any] = {
    "train": TrainFlags,
    "optim": OptimFlags,
    "moe": MoeFlags,
    "megatron": MegatronFlags,
    "checkpoint": CheckpointFlags,
}
REPLAY = {"none": {}, "policy": {"use_routing_replay": True}, "rollout": {"use_rollout_routing_replay": True}}
OFFLOAD = {"nothing": {}, "moments": {"offload_optimizer_states": True}, "all": {"optimizer_cpu_offload": True}}


def fsdp_backend(
    folder: Path | str, ranks: Ranks | None = None, *, share_prompts: bool = True, **values: Any
) -> FsdpBackend:
    """Build the FSDP backend for the transformers model in the folder; for `values` see `backend_settings`."""
    return FsdpBackend(backend_settings(folder, **values), ranks=ranks, share_prompts=share_prompts)


def megatron_backend(folder: Path | str, ranks: Ranks, **values: Any) -> MegatronBackend:
    """Build the Megatron backend, after a call of `compat.prepare`; for `values` see `backend_settings`."""
    from furlong.training.megatron.megatron_backend import MegatronBackend

    return MegatronBackend(backend_settings(folder, **values), ranks=ranks)


def backend_settings(
    folder: Path | str,
    *,
    layout: Layout | None = None,
    balancing: LoadBalancing | None = None,
    routing_replay: str = "none",
    offload_optimizer: str = "nothing",
    **values: Any,
) -> BackendSettings:
    """Return settings. `values` may contain flags of any section, whole sections, and fields of `BackendSettings`."""
    values |= REPLAY[routing_replay] | OFFLOAD[offload_optimizer]
    values |= {} if layout is None else _layout_flags(layout)
    values |= {} if balancing is None else _balancing_flags(balancing)
    for section, kind in SECTIONS.items():
        flags = {field.name: values.pop(field.name) for field in dataclasses.fields(kind) if field.name in values}
        values[section] = dataclasses.replace(values.get(section, kind()), **flags)
    values["device"] = torch.device(values.get("device", "cpu"))
    return BackendSettings(hf_checkpoint=Path(folder), **values)


def _layout_flags(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        "num_virtual_stages_per_pipeline_rank": layout.virtual,
        "decoder_first_pipeline_num_layers": layout.first_layers,
        "decoder_last_pipeline_num_layers": layout.last_layers,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def _balancing_flags(balancing: LoadBalancing) -> dict[str, Any]:
    return {
        "moe_router_load_balancing_type": balancing.kind,
        "moe_aux_loss_coeff": balancing.coeff,
        "moe_z_loss_coeff": balancing.z_coeff,
        "moe_router_enable_expert_bias": balancing.bias_rate > 0,
        "moe_router_bias_update_rate": balancing.bias_rate,
    }
