"""Flags of the section `engines`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class EnginesFlags:
    """Inference servers that furlong starts: number, GPUs, logs and options."""

    rollout_num_gpus: int | None = flag(
        None,
        "Total number of GPUs for inference servers, one server per --rollout-num-gpus-per-engine GPUs. With "
        "--engine embedded this is the number of servers, also on CPUs; without this flag that engine runs in this "
        "process.",
        within="[1, inf)",
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs per engine.", within="[1, inf)", needs="rollout_num_gpus")
    prefill_num_servers: int | None = flag(
        None,
        "Number of engines that only prefill; the others only decode, behind a router (--sglang-router-strategy). "
        "Requires --engine sglang.",
        within="[1, inf)",
        needs="rollout_num_gpus",
        excludes="sglang_config",
    )
    sglang_config: str | None = flag(
        None,
        "YAML file of models and their engine groups: GPUs, role (regular, prefill, decode, placeholder) and "
        "options. Sets --rollout-num-gpus to their total. Exactly one model is trained.",
    )
    sglang_log_dir: str | None = flag(
        None, "Directory of the engine logs. Default: logs/ in the run directory.", needs="rollout_num_gpus"
    )
    sglang_server_start_timeout: float = flag(
        1800.0, "Timeout of an engine's start, in seconds.", within="(0, inf)", needs="rollout_num_gpus"
    )
    sglang_options: dict[str, Any] = flag(  # noqa: RUF009  flag() declares a field
        {},
        "SGLang options as a JSON object; each is also available as a flag --sglang-NAME, such as "
        "--sglang-attention-backend fa3 or --sglang-disable-cuda-graph.",
    )
    sglang_router_strategy: Literal["direct", "cache_aware", "round_robin", "random", "power_of_two", "manual"] = flag(
        "direct",
        "Routing of requests: `direct` sends them from this process, keeping the samples of a prompt together and "
        "the load even; the others start an sglang-router with this policy. `manual` keeps sessions on one engine.",
        needs="rollout_num_gpus",
    )
    router_options: dict[str, Any] = flag(  # noqa: RUF009  flag() declares a field
        {}, "sglang-router options as a JSON object; each is also available as a flag --router-NAME."
    )
