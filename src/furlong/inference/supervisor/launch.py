"""Commands, environments and ports of the servers that a run starts: SGLang (`SglangLaunch`) and `furlong serve`."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from furlong.config.checks.engine_checks import start_problems
from furlong.config.engine_groups import EngineGroup, ServedModel, engine_parts, served_models
from furlong.config.evaluation import used_eval_specs
from furlong.config.facts import returns_routes
from furlong.config.sections import Config
from furlong.core.addresses import host_and_port, is_loopback
from furlong.core.process_environment import API_KEY_VARIABLE, KEY, api_key_environment
from furlong.errors import ConfigError, EngineError
from furlong.inference.supervisor.process import HostGpus
from furlong.models.quantized_folder import is_quantized
from furlong.sglang_layout.quantized_loading import LOADER
from furlong.transfer.cuda_allocator import without_expandable_segments

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


@dataclass(frozen=True)
class Launch(ABC):
    """Launch settings of one kind of server. Engine `index` samples with seed `seed + index`.

    env: variables to add to its environment. role: the role of the engine in a request.
    """

    model_dir: Path
    _: KW_ONLY
    seed: int = 0
    api_key: str | None = None
    context_len: int | None = None
    return_routed_experts: bool = False
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    role: EngineRole = "regular"

    needs_rendezvous: ClassVar[bool] = False
    """Whether ports must be reserved for the rendezvous of its processes."""

    def for_group(self, group: EngineGroup) -> Launch:
        """Return the settings for the engines of a group."""
        del group
        return self

    @abstractmethod
    def command(self, index: int, node: int, placement: Sequence[HostGpus], ports: Ports) -> list[str]:
        """Return the command of engine `index` on node `node` of its placement; only node 0 serves HTTP.

        Raises ConfigError for an address that other machines can reach without an API key.
        """

    def environment(self, gpus: HostGpus) -> Mapping[str, str]:
        """Return the variables to add to its environment on one node."""
        del gpus
        return {**api_key_environment(self.api_key), **self.env}


@dataclass(frozen=True)
class SglangLaunch(Launch):
    """Stock SGLang 0.5.16. `options` are ServerArgs by field name; they override those that furlong sets.

    `has_text` loads the tokenizer in the server, for stop strings and the chat API. `is_colocated` lets the server
    release its memory for the trainer.
    """

    _: KW_ONLY
    num_gpus: int
    has_text: bool = True
    is_colocated: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    needs_rendezvous: ClassVar[bool] = True

    def for_group(self, group: EngineGroup) -> Launch:
        """Return the settings for a group, whose options override those of all engines."""
        assert group.role != "placeholder"
        return replace(self, num_gpus=group.gpus_per_engine, options={**self.options, **group.options}, role=group.role)

    def command(self, index: int, node: int, placement: Sequence[HostGpus], ports: Ports) -> list[str]:
        """Return the command; see `Launch.command`."""
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
            "dist_init_addr": host_and_port(first, ports.rendezvous),
        }
        if len(placement) > 1:
            values |= {"nnodes": len(placement), "node_rank": node}
        if self.role != "regular":
            values |= {"disaggregation_mode": self.role, "disaggregation_bootstrap_port": ports.bootstrap}
        options = {"api_key": KEY if self.api_key else None, **values, **self.options}
        return [*module_command("sglang.launch_server", self.api_key), *argv_from_options(options)]

    def environment(self, gpus: HostGpus) -> Mapping[str, str]:
        """Return the variables to add to its environment.

        By default /health generates a token, which kills a server whose cache is released; /health_generate still
        does. torch_memory_saver rejects expandable segments of torch. Engines that transfer KV caches listen on an
        address that they would look up themselves, which other machines may reach.
        """
        split = {} if self.role == "regular" else {"SGLANG_HOST_IP": gpus.host.address}
        cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if self.options.get("device") == "cpu" else {}
        colocated = without_expandable_segments(os.environ) if self.is_colocated else {}
        no_token = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
        return {**no_token, **split, **cpu, **colocated, **super().environment(gpus)}


@dataclass(frozen=True)
class ServeLaunch(Launch):
    """`furlong serve`. `dtype` is the name of a torch dtype; `device` "cuda" means the first GPU of the placement."""

    _: KW_ONLY
    dtype: str = "float32"
    device: str = "cpu"
    num_slots: int = 128
    num_threads: int | None = None

    def command(self, index: int, node: int, placement: Sequence[HostGpus], ports: Ports) -> list[str]:
        """Return the command of a single process. Raises EngineError for more than one node."""
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


def build_launches(config: Config, *, model_dir: Path, dtype: str, device: str, num_threads: int) -> list[Launch]:
    """Return the launch settings of each engine, over all models.

    `model_dir`, `dtype` and `device` are those of the trainer; `num_threads` is for each `furlong serve`.
    """
    launches: list[Launch] = []
    for model in served_models(config):
        if config.cluster.engine == "sglang":
            launch = _sglang(config, model, model_dir, dtype)
        else:
            launch = _serve(config, model, model_dir, dtype=dtype, device=device, num_threads=num_threads)
        launches += [launch.for_group(part.group) for part in engine_parts(model.groups)]
    return launches


def _sglang(config: Config, model: ServedModel, model_dir: Path, dtype: str) -> Launch:
    defaults: dict[str, Any] = {}
    if model.is_trained and dtype != "float32":
        defaults["dtype"] = dtype
    if config.train.deterministic_mode:
        defaults["enable_deterministic_inference"] = True
    if model.is_trained and is_quantized(model_dir):
        defaults["custom_weight_loader"] = [LOADER]
    return SglangLaunch(
        model_dir if model.path is None else Path(model.path),
        num_gpus=config.engines.rollout_num_gpus_per_engine,
        seed=config.train.seed,
        api_key=config.cluster.sglang_api_key,
        context_len=config.rollout.rollout_max_context_len if model.is_trained else None,
        has_text=not model.is_trained or _needs_text(config),
        is_colocated=config.cluster.colocate and bool(config.cluster.offload_rollout),
        return_routed_experts=model.is_trained and returns_routes(config),
        options=defaults | config.engines.sglang_options,
    )


def _serve(config: Config, model: ServedModel, model_dir: Path, *, dtype: str, device: str, num_threads: int) -> Launch:
    cluster = config.cluster
    return ServeLaunch(
        model_dir if model.path is None else Path(model.path),
        dtype=dtype if cluster.embedded_dtype == "auto" else cluster.embedded_dtype,
        device=device,
        seed=config.train.seed,
        api_key=cluster.sglang_api_key,
        context_len=config.rollout.rollout_max_context_len if model.is_trained else None,
        num_slots=cluster.embedded_num_slots,
        num_threads=num_threads,
        return_routed_experts=model.is_trained and returns_routes(config),
    )


def _needs_text(config: Config) -> bool:
    """Whether servers need the tokenizer: for stop strings, and for user functions that may use the chat API."""
    rollouts = [config.rollout, *(spec.config.rollout for spec in used_eval_specs(config))]
    return any(rollout.rollout_stop or rollout.custom_generate_function_path for rollout in rollouts)


def _check_key(key: str | None, index: int, address: str) -> None:
    """Raise ConfigError for a server without an API key at an address that other machines can reach."""
    if problem := key_problem(key, f"engine {index}", address):
        raise ConfigError(problem)


def key_problem(key: str | None, who: str, address: str) -> str | None:
    """Return the problem of a server without an API key at an address that other machines can reach, else None."""
    if key or is_loopback(address):
        return None
    return (
        f"{who} would listen on {address} without an API key, where other machines could replace its weights; set "
        f"--sglang-api-key or {API_KEY_VARIABLE}"
    )


def module_command(module: str, key: str | None) -> list[str]:
    """Return the command of a module whose arguments may have KEY for the key in `api_key_environment`."""
    return [sys.executable, "-m", *(["furlong.inference.supervisor.with_api_key"] if key else []), module]


def argv_from_options(values: Mapping[str, Any]) -> list[str]:
    """Return options by field name as command-line arguments. None and False are omitted, True is a switch.

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


def check_startable(config: Config, device: str) -> None:
    """Check for SGLang, sglang-router and GPUs. Raises ConfigError for what is missing."""
    if problems := list(start_problems(config, device)):
        raise ConfigError(*problems)
