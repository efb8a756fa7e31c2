"""Commands, environments and ports of the servers that a run starts: SGLang (`SglangLaunch`) and `furlong serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from furlong.core.cuda_allocator import without_expandable_segments
from furlong.core.process_environment import API_KEY_VARIABLE, api_key_environment
from furlong.errors import ConfigError, EngineError
from furlong.inference.supervisor.host import HostGpus, is_loopback

RENDEZVOUS_PORTS = 8  # SGLang counts up from --dist-init-addr

EngineRole = Literal["regular", "prefill", "decode"]


@dataclass(frozen=True)
class Ports:
    """Ports of one engine on its first node. `rendezvous` is the first of `RENDEZVOUS_PORTS`.

    Decode engines fetch KV caches from the `bootstrap` port of a prefill engine.
    """

    http: int
    nccl: int
    rendezvous: int
    bootstrap: int | None = None


class Launch(Protocol):
    """Launch settings of one kind of server."""

    @property
    def api_key(self) -> str | None:
        """The API key of its servers."""
        ...

    @property
    def needs_rendezvous(self) -> bool:
        """Whether ports must be reserved for the rendezvous of its processes."""
        ...

    @property
    def role(self) -> EngineRole:
        """Role of the engine in a request."""
        ...

    def command(self, index: int, node: int, placement: Sequence[HostGpus], ports: Ports) -> list[str]:
        """The command of engine `index` on node `node` of its placement."""
        ...

    def environment(self, gpus: HostGpus) -> Mapping[str, str]:
        """Variables to add to its environment on one node."""
        ...


@dataclass(frozen=True)
class SglangLaunch:
    """Stock SGLang 0.5.16. `options` are ServerArgs by field name; they override those that furlong sets.

    `has_text` loads the tokenizer in the server, for stop strings and the chat API. `is_colocated` lets the server
    release its memory for the trainer. Engine `index` samples with seed `seed + index`.
    """

    model_dir: Path
    num_gpus: int
    seed: int = 0
    api_key: str | None = None
    context_len: int | None = None
    has_text: bool = True
    is_colocated: bool = False
    return_routed_experts: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    needs_rendezvous: bool = True
    role: EngineRole = "regular"

    def command(self, index: int, node: int, placement: Sequence[HostGpus], ports: Ports) -> list[str]:
        """The command of engine `index` on node `node`; only node 0 serves HTTP.

        Raises ConfigError for an address that other machines can reach without an API key.
        """
        pp_size = int(self.options.get("pp_size", 1))
        first = placement[0].host.address
        _check_key(self.api_key, index, placement[node].host.address)
        values: dict[str, Any] = {
            "model_path": str(self.model_dir),
            "host": placement[node].host.address,
            "port": ports.http,
            "nccl_port": ports.nccl,
            "tp_size": self.num_gpus // pp_size,
            "base_gpu_id": placement[node].first_gpu,
            "random_seed": self.seed + index,
            "skip_tokenizer_init": not self.has_text,
            "enable_memory_saver": self.is_colocated,
            "context_length": self.context_len,
            "enable_return_routed_experts": self.return_routed_experts,
            "dist_init_addr": f"{first}:{ports.rendezvous}",
        }
        if len(placement) > 1:
            values |= {"nnodes": len(placement), "node_rank": node}
        if self.role != "regular":
            values |= {"disaggregation_mode": self.role, "disaggregation_bootstrap_port": ports.bootstrap}
        return [*module_command("sglang.launch_server", self.api_key), *argv_from_options(values | dict(self.options))]

    def environment(self, gpus: HostGpus) -> Mapping[str, str]:
        """Variables to add to its environment.

        By default /health generates a token, which kills a server whose cache is released; /health_generate still
        does. torch_memory_saver rejects expandable segments of torch. Engines that transfer KV caches listen on an
        address that they would look up themselves, which other machines may reach.
        """
        split = {} if self.role == "regular" else {"SGLANG_HOST_IP": gpus.host.address}
        cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if self.options.get("device") == "cpu" else {}
        colocated = without_expandable_segments(os.environ) if self.is_colocated else {}
        common = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", **api_key_environment(self.api_key)}
        return {**common, **split, **cpu, **colocated, **self.env}


@dataclass(frozen=True)
class ServeLaunch:
    """`furlong serve`. `dtype` is the name of a torch dtype; `device` "cuda" means the first GPU of the placement."""

    model_dir: Path
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    api_key: str | None = None
    context_len: int | None = None
    num_slots: int = 128
    num_threads: int | None = None
    return_routed_experts: bool = False
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    needs_rendezvous: bool = False
    role: EngineRole = "regular"

    def command(self, index: int, node: int, placement: Sequence[HostGpus], ports: Ports) -> list[str]:
        """The command of engine `index`, a single process.

        Raises EngineError for more than one node and ConfigError for an address that other machines can reach without
        an API key.
        """
        if len(placement) != 1:
            raise EngineError(f"furlong serve runs on one node, but engine {index} was placed on {len(placement)}")
        gpus = placement[node]
        _check_key(self.api_key, index, gpus.host.address)
        values: dict[str, Any] = {
            "model_path": str(self.model_dir),
            "host": gpus.host.address,
            "port": ports.http,
            "dtype": self.dtype,
            "device": f"cuda:{gpus.first_gpu}" if self.device == "cuda" else self.device,
            "max_running_requests": self.num_slots,
            "context_length": self.context_len,
            "threads": self.num_threads,
            "random_seed": self.seed + index,
            "enable_return_routed_experts": self.return_routed_experts,
        }
        return [sys.executable, "-m", "furlong", "serve", *argv_from_options(values)]

    def environment(self, gpus: HostGpus) -> Mapping[str, str]:
        """Variables to add to its environment."""
        del gpus
        return {**api_key_environment(self.api_key), **self.env}


def _check_key(key: str | None, index: int, address: str) -> None:
    """Raise ConfigError for a server without an API key at an address that other machines can reach."""
    if not key and not is_loopback(address):
        raise ConfigError(
            f"engine {index} would listen on {address} without an API key, where other machines could replace its "
            f"weights; set --sglang-api-key or {API_KEY_VARIABLE}"
        )


def module_command(module: str, key: str | None) -> list[str]:
    """The command of a module that takes its key as `--api-key`, which `api_key_environment` passes out of sight."""
    return [sys.executable, "-m", *(["furlong.inference.supervisor.api_key_runner"] if key else []), module]


def argv_from_options(values: Mapping[str, Any]) -> list[str]:
    """Options by field name as command-line arguments. None and False are omitted, True is a switch.

    >>> argv_from_options({"tp_size": 2, "skip_tokenizer_init": True, "api_key": None})
    ['--tp-size', '2', '--skip-tokenizer-init']
    """
    argv: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        if value is not True:
            argv += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return argv
