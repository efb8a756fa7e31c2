"""Faults that depend on the machine, injected where the program reads its facts, and rows that need other models."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from diagnosis_score import Case, case, doctor
from faults.score_healthy import family_folder
from faults.test_preflight_checkpoints import write_checkpoint
from faults.world import World
from furlong.catalogue import Diagnosis
from furlong.cluster.nodes import Node
from furlong.config.command_line import config_from_values
from furlong.diagnosis.preflight import preflight
from furlong.tools.environment import Installation, Package, environment_findings
from furlong.tools.gpu_memory import GpuInUse
from furlong.tools.model_folder import check_model
from stored_models import expert_layer, write_stored_model

MACHINE = "furlong.diagnosis.preflight.machine_checks."
GIB = 1 << 30
NO_CONNECTION: dict[str, Any] = {f"{MACHINE}_speaks_grpc": lambda *_: True}
CLUSTERED: dict[str, Any] = {"ray_address": "127.0.0.1:6379", "actor_num_gpus_per_node": 2, "rollout_num_gpus": 1}
SERVED: dict[str, Any] = {"engine": "external", "rollout_external_engine_addrs": ["127.0.0.1:1"]}


def _gpus(count: int) -> dict[str, Any]:
    """This machine has so many GPUs."""
    return {f"{MACHINE}_gpu_files": lambda _: [Path(f"/dev/nvidia{i}") for i in range(count)]}


def _memory(gibibytes: float) -> dict[str, Any]:
    """The first GPU has so much memory."""
    return {f"{MACHINE}local_device": lambda: ("Tiny GPU", int(gibibytes * GIB))}


def _nodes(*slots: int, resource: str = "CPU", address: str = "127.0.0.1") -> dict[str, Any]:
    """A cluster of machines with so many slots answers."""
    nodes = [Node(f"node{i}", address, count, count) for i, count in enumerate(slots)]
    return NO_CONNECTION | {"furlong.run.checks.cluster_nodes": lambda _: (nodes, resource)}


def _large(world: World) -> None:
    path = world.model / "config.json"
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "vocab_size": 151_936}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes | {"layer_types": None}))


def _tied(world: World) -> None:
    path = world.model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))


def _other_head(world: World) -> None:
    """An output layer beside a tied embedding, with other values."""
    from safetensors.torch import load_file, save_file

    path = world.model / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, path, {"format": "pt"})


def _resumed(*, ranks: int = 1, optimizer: bool = True, **flags: Any) -> Callable[[World], dict[str, Any]]:
    def prepare(world: World) -> dict[str, Any]:
        folder = write_checkpoint(world.folder / "save", 2, optimizer=optimizer)
        for rank in range(1, ranks):
            (folder / "trainer" / f"trainer_rng-{rank}.safetensors").write_bytes(b"12345678")
        return {"load": world.folder / "save", "num_rollout": 9} | flags

    return prepare


def _converted(change: Callable[[dict[str, Any]], Any], **settings: Any) -> Callable[[Path], Iterable[Diagnosis]]:
    """A folder of quantized experts, as a conversion left it."""

    def diagnose(folder: Path) -> Iterable[Diagnosis]:
        layers = [expert_layer(number) for number in range(2)]
        change(layers[1])
        quantization = {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp.gate$"]} | settings
        write_stored_model(folder / "int4", layers, num_hidden_layers=2, quantization_config=quantization)
        return check_model(folder / "int4", id="QNT02")

    return diagnose


def _installed(name: str, version: str, problem: str = "") -> Callable[[Path], Iterable[Diagnosis]]:
    package = Package(name, version, ">=5.12,<6", is_tested=not version.startswith("4"), problem=problem)
    return lambda _: environment_findings(Installation("0", "3.11", "x86_64", "", [package]))


def _raising(error: Exception) -> Callable[[Path], Iterable[Diagnosis]]:
    def check(_: object) -> list[Diagnosis]:
        raise error

    return lambda _: preflight(config_from_values({}), checks=[check])


MACHINES = (
    *(doctor(f"{asked} GPUs asked, {count} there", "GPU01", {"actor_num_gpus_per_node": asked, "colocate": True},
             patches=_gpus(count), also="CFG05 ENV01 ENV02 CFG01 GPU03", remedy="--actor-num-gpus-per-node")
      for asked, count in ((2, 1), (8, 4), (16, 8))),
    doctor("trainers and engines exceed the GPUs", "GPU01", {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2},
           patches=_gpus(2), also="CFG05 ENV01", remedy="--colocate"),
    *(doctor(f"a cluster of {' + '.join(map(str, slots))} slots for 3", "GPU01", CLUSTERED, patches=_nodes(*slots),
             remedy="--") for slots in ((2,), (1, 1))),
    doctor("no machine of the cluster is large enough", "GPU01",
           CLUSTERED | {"actor_num_gpus_per_node": 4, "rollout_num_gpus": None, "colocate": True},
           patches=_nodes(1, 3), remedy="--actor-num-nodes"),
    doctor("engines with network addresses and no key", "CFG05", CLUSTERED, patches=_nodes(4, address="10.0.0.4"),
           remedy="--sglang-api-key"),
    *(doctor(f"a model of 4B on {size} GiB", "MEM01", {"bf16": True}, _large, patches=_memory(size), also="CKPT04",
             remedy="--") for size in (8, 16, 24)),
    *(doctor(f"{used} GiB of a GPU are in use", "GPU04", {}, patches={
        f"{MACHINE}gpus_in_use": lambda *_, used=used: [GpuInUse(0, "GPU", used * GIB, 80 * GIB, ("71 python",))]},
        remedy="kill 71|CUDA_VISIBLE_DEVICES") for used in (10, 70)),
    doctor("a container of two CPUs", "ENV02", {"num_threads": 16},
           patches={f"{MACHINE}cpu_quota": lambda: 2.0}, remedy="--num-threads", fixed={"num_threads": 2}),
    doctor("AMX with determinism", "DET01", {"debug_determinism": True, "embedded_dtype": "bfloat16"},
           patches={f"{MACHINE}has_amx": lambda: True}, remedy="--embedded-dtype float32",
           fixed={"embedded_dtype": "float32"}),
    case("transformers of another major version", "ENV01", _installed("transformers", "4.51.0"),
         remedy="pip install 'transformers>=5.12,<6'"),
    case("a kernel that does not load", "ENV01", _installed("flash-attn", "2.8", "undefined symbol: _ZN3c10"),
         remedy="pip install"),
    case("a check that fails", "CHECK01", _raising(ZeroDivisionError("division by zero")), remedy="report"),
    case("a check that meets a missing key", "CHECK01", _raising(KeyError("x")), remedy="report"),
)  # fmt: skip

MODELS = (
    doctor("routers that SGLang keeps", "SYNC03", SERVED | {"engine": "sglang", "rollout_external_engine_addrs": None,
           "rollout_num_gpus": 1}, model=functools.partial(family_folder, "glm4_moe"), also="CFG05 ENV01",
           remedy="--freeze-params-name-list"),
    doctor("a tied head that SGLang does not tie", "SYNC04",
           {"engine": "sglang", "rollout_num_gpus": 1}, _tied, model=functools.partial(family_folder, "qwen3_moe"),
           also="CFG05 ENV01 CKPT04 CKPT03", remedy="tie_word_embeddings|--engine embedded"),
    doctor("an output layer beside a tied embedding", "CKPT03", None, _other_head, remedy="tie_word_embeddings"),
    case("a router that would be quantized", "QNT01", _converted(lambda _: None, ignore=["lm_head"]),
         remedy='"re:.*mlp\\\\.gate'),
    case("no weight is ignored", "QNT01", _converted(lambda _: None, ignore=[]), remedy="quantization_config.ignore"),
    *(case(f"an expert without its {part}", "QNT02",
           _converted(lambda layer, part=part: layer.pop(f"model.layers.1.mlp.experts.0.up_proj.weight_{part}")),
           remedy="furlong check") for part in ("scale", "shape")),
    case("a layer that the conversion left out", "QNT02",
         _converted(lambda layer: [layer.pop(name) for name in [*layer]]), remedy="furlong check"),
    doctor("a checkpoint of four ranks", "CKPT05", None, _resumed(ranks=4), also="CKPT06", remedy="no action"),
    doctor("a checkpoint without optimizer", "CKPT06", None, _resumed(optimizer=False), remedy="initialized"),
    doctor("a run that is complete", "CKPT06", None, _resumed(num_rollout=2), remedy="--num-rollout 4",
           fixed={"num_rollout": 4}),
    doctor("a position that contradicts the flag", "CKPT01", None, _resumed(start_rollout_id=1), also="CKPT06",
           remedy="remove it", fixed=lambda _: {"start_rollout_id": None}),
)  # fmt: skip

CASES: tuple[Case, ...] = (*MACHINES, *MODELS)
