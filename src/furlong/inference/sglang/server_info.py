"""The settings that an engine server reports at /server_info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from furlong.core.weights import EngineSharding
from furlong.sglang_layout.layout_facts import PLAIN_EXPERTS, PLAIN_SHARES, PLAIN_TENSORS, options_beside


@dataclass(frozen=True)
class ServerInfo:
    """Settings of a server. With `has_dp_attention`, `dp_size` parts share the `tp_size` processes.

    expert_options: Options that change the memory layout of experts from that of `sglang_layout`; "" if
        there are none.
    layout_options: Options that change the memory layout of tensors from that of `sglang_layout.fused_checksums` and
        `sglang_layout.shard_checksums`; "" if there are none.
    returns_routes: Requests may ask for routed experts. True if the server does not report it; then it may refuse.
    speculation: Algorithm of speculative decoding; "" for none.
    """

    is_furlong: bool
    software: str
    dtype: str
    device_type: str
    tp_size: int
    pp_size: int
    dp_size: int
    context_len: int | None
    is_quantized: bool = False
    has_dp_attention: bool = False
    has_prefix_cache: bool = True
    expert_options: str = ""
    has_dp_head: bool = False
    layout_options: str = ""
    num_http_processes: int = 1
    returns_routes: bool = True
    speculation: str = ""
    ep_size: int = 1

    @staticmethod
    def read(answer: Mapping[str, Any]) -> ServerInfo:
        """Parse the answer to /server_info."""
        software = str(answer.get("version", ""))
        is_furlong = software.startswith("furlong ")
        length, tp_size = answer.get("context_length"), int(answer.get("tp_size") or 1)
        plain = {**PLAIN_TENSORS, **(PLAIN_SHARES if tp_size > 1 else {})}
        return ServerInfo(
            is_furlong=is_furlong,
            software=software if is_furlong else f"SGLang {software}",
            dtype=str(answer.get("dtype", "auto")),
            device_type=str(answer.get("device", "cuda")).partition(":")[0],
            tp_size=tp_size,
            pp_size=int(answer.get("pp_size") or 1),
            dp_size=int(answer.get("dp_size") or 1),
            context_len=int(length) if length else None,
            is_quantized=bool(answer.get("quantization")),
            has_dp_attention=bool(answer.get("enable_dp_attention")),
            has_prefix_cache=not answer.get("disable_radix_cache"),
            expert_options="" if is_furlong else options_beside(answer, PLAIN_EXPERTS),
            has_dp_head=bool(answer.get("enable_dp_lm_head")),
            layout_options="" if is_furlong else options_beside(answer, plain),
            num_http_processes=int(answer.get("tokenizer_worker_num") or 1),
            returns_routes=bool(answer.get("enable_return_routed_experts", True)),
            ep_size=int(answer.get("ep_size") or 1),
            speculation=str(answer.get("speculative_algorithm") or ""),
        )

    @property
    def sharding(self) -> EngineSharding:
        """How the processes shard one copy of the model."""
        attention = self.tp_size // self.dp_size if self.has_dp_attention else self.tp_size
        return EngineSharding(self.tp_size, attention, attention if self.has_dp_head else self.tp_size, self.ep_size)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs, or of processes on CPUs."""
        return self.tp_size * self.pp_size * (1 if self.has_dp_attention else self.dp_size)

    @property
    def caches_late(self) -> bool:
        """Whether requests that are prefilled together each compute a shared prompt, which is cached afterwards.

        False with data-parallel attention, where each part has its own cache.
        """
        return not self.is_furlong and self.has_prefix_cache and self.dp_size == 1
