"""Engine servers that furlong starts and watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class EnginesFlags:
    """Engine servers that furlong starts: how many, where their logs go, and what happens when one fails."""

    rollout_num_gpus: int | None = flag(
        None,
        "GPUs that engines get; they are --rollout-num-gpus / --rollout-num-gpus-per-engine servers. With --engine "
        "embedded it is the number of servers, also on a CPU; without it that engine runs in this process.",
        within="[1, inf)",
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one engine.", within="[1, inf)", needs="rollout_num_gpus")
    prefill_num_servers: int | None = flag(
        None,
        "Engines that only prefill; the others only decode, and a router (--sglang-router-strategy) joins them. With "
        "--engine sglang.",
        within="[1, inf)",
        needs="rollout_num_gpus",
    )
    sglang_config: str | None = flag(
        None,
        "YAML file of models and of the engine groups of each, with their GPUs, role (regular, prefill, decode, "
        "placeholder) and options; --rollout-num-gpus is their sum. One model is trained.",
    )
    sglang_log_dir: str | None = flag(
        None, "Folder of the engines' logs. Without it: logs/ in the run's folder.", needs="rollout_num_gpus"
    )
    sglang_server_start_timeout: float = flag(
        1800.0, "Seconds that an engine may take to come up.", within="(0, inf)", needs="rollout_num_gpus"
    )
    sglang_options: dict[str, Any] = flag(  # noqa: RUF009  flag() declares a field
        {},
        "SGLang's own options as a JSON object; each can be given as --sglang-NAME, such as --sglang-attention-backend "
        "fa3 or --sglang-disable-cuda-graph.",
    )
    sglang_router_strategy: Literal["direct", "cache_aware", "round_robin", "random", "power_of_two", "manual"] = flag(
        "direct",
        "How requests find an engine: `direct` from this process, which keeps a prompt's samples together and engines "
        "evenly loaded; the others start an sglang-router with this policy. `manual` keeps sessions together.",
        needs="rollout_num_gpus",
    )
    router_options: dict[str, Any] = flag(  # noqa: RUF009  flag() declares a field
        {},
        "sglang-router's own options as a JSON object; each can be given as --router-NAME.",
    )
