"""What an engine server says of itself at /server_info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from furlong.core.weights import EngineSharding
from furlong.sglang_layout.layout_facts import PLAIN_EXPERTS, PLAIN_SHARES, PLAIN_TENSORS, options_beside


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself. With `has_dp_attention`, `dp_size` parts share the `tp_size` processes.

    `expert_options` are those by which SGLang's experts are not in memory as `sglang_layout.expert_stacks` has them, `layout_options`
    those by which tensors are not in its memory, or that of its `processes`, as `sglang_layout.fused_checksums` and `sglang_layout.shard_checksums` have
    them; "" if there are none. `returns_routes`: requests may ask which experts their tokens went to;
    a server that does not say so refuses them, if it cannot. `speculation` is the algorithm that drafts tokens, "" if
    there is none.
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
        """Parse the answer of /server_info."""
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
    def processes(self) -> EngineSharding:
        """Those that have a copy of the model together."""
        attention = self.tp_size // self.dp_size if self.has_dp_attention else self.tp_size
        return EngineSharding(self.tp_size, attention, attention if self.has_dp_head else self.tp_size, self.ep_size)

    @property
    def num_gpus(self) -> int:
        """GPUs that it runs on, or processes on CPUs."""
        return self.tp_size * self.pp_size * (1 if self.has_dp_attention else self.dp_size)

    @property
    def caches_late(self) -> bool:
        """Whether it computes a prompt for each of the requests that it prefills together, and caches it then.

        Parts that split requests among them have a cache each.
        """
        return not self.is_furlong and self.has_prefix_cache and self.dp_size == 1
