"""Settings of an engine server, from its answer to /server_info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from furlong.core.weights import EngineSharding
from furlong.inference.sglang.engine_answers import label, optional_text, whole
from furlong.sglang_layout.layout_facts import PLAIN_EXPERTS, PLAIN_SHARES, PLAIN_TENSORS, options_beside
from furlong.sglang_layout.quantized_loading import LOADER


@dataclass(frozen=True)
class ServerInfo:
    """Settings of a server. With `has_dp_attention`, `dp_size` parts share the `tp_size` processes.

    expert_options: Options that change the memory layout of experts from that of `sglang_layout`; "" if none.
    layout_options: Options that change the layout of tensors from that of `sglang_layout`; "" if none.
    returns_routes: Requests may ask for routed experts. True if the server does not report it; then it may refuse.
    speculation: Algorithm of speculative decoding; "" for none.
    kv_cache_dtype: SGLang's option; "auto" is the model's data type.
    has_quantized_loader: It was started with furlong's loader of quantized weights.
    streams_increments: Events of a stream have the new tokens only, and not all so far.
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
    streams_increments: bool = False
    has_quantized_loader: bool = False
    kv_cache_dtype: str = "auto"

    @staticmethod
    def read(answer: Mapping[str, Any], where: str = "GET /server_info") -> ServerInfo:
        """Parse the answer to /server_info, the request `where`. Raises EngineError for values of another type."""
        software = label(answer, "version", where) if "version" in answer else ""
        is_furlong = software.startswith("furlong ")
        size = partial(whole, answer, where=where, default=1)
        tp_size = size("tp_size")
        plain = {**PLAIN_TENSORS, **(PLAIN_SHARES if tp_size > 1 else {})}
        return ServerInfo(
            is_furlong=is_furlong,
            software=software if is_furlong else f"SGLang {software}",
            dtype=optional_text(answer, "dtype", where, "auto"),
            device_type=optional_text(answer, "device", where, "cuda").partition(":")[0],
            tp_size=tp_size,
            pp_size=size("pp_size"),
            dp_size=size("dp_size"),
            context_len=whole(answer, "context_length", where, default=0) or None,
            is_quantized=bool(answer.get("quantization")),
            has_dp_attention=bool(answer.get("enable_dp_attention")),
            has_prefix_cache=not answer.get("disable_radix_cache"),
            expert_options="" if is_furlong else options_beside(answer, PLAIN_EXPERTS),
            has_dp_head=bool(answer.get("enable_dp_lm_head")),
            layout_options="" if is_furlong else options_beside(answer, plain),
            num_http_processes=size("tokenizer_worker_num"),
            returns_routes=bool(answer.get("enable_return_routed_experts", True)),
            ep_size=size("ep_size"),
            speculation=optional_text(answer, "speculative_algorithm", where),
            streams_increments=bool(answer.get("incremental_streaming_output")),
            has_quantized_loader=LOADER in (answer.get("custom_weight_loader") or ()),
            kv_cache_dtype=optional_text(answer, "kv_cache_dtype", where, "auto"),
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
