"""MEM01: the predicted memory of a run against the GPU and the memory of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from furlong.core.catalogue import Diagnosis
from furlong.diagnosis.preflight.context import Context
from furlong.errors import ConfigError
from furlong.machine import MemoryUse
from furlong.models.hf_folder import read_json
from furlong.tools.gpu_memory import local_device
from furlong.tools.memory_plan import cpu_findings, findings, host_findings, plan_memory


def training_fits(context: Context) -> Iterator[Diagnosis]:
    """MEM01: the largest phase of training against the first GPU of this machine, or where it has none its memory."""
    if context.model_dir is None or context.config.debug.debug_rollout_only:
        return
    path = context.model_dir / "config.json"
    device, machine = local_device(), MemoryUse.of_machine()
    if not path.exists():
        return
    model = read_json(path)
    try:
        if device is not None:
            plan = plan_memory(context.config, model, device[1])
            yield from findings(plan, device[0])
            if machine is not None:
                yield from host_findings(plan, context.config, machine.limit)
        elif machine is not None:
            yield from cpu_findings(context.config, model, machine)
    except ConfigError:
        return  # a kind of model whose dimensions are not known here; `furlong plan` says which one is missing
