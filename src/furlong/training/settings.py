"""Configuration of a training backend: flag sections plus the facts that are not flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from furlong.config.checks.engine_checks import offload_problem
from furlong.config.sections import CheckpointFlags, MegatronFlags, MoeFlags, OptimFlags, TrainFlags
from furlong.core.algorithms import Role
from furlong.core.batch import MicroBatch
from furlong.errors import ConfigError, TrainerError
from furlong.quantization.scheme import QuantizationScheme

Offload = Literal["nothing", "moments", "all"]
Replay = Literal["none", "policy", "rollout"]

REPLAYED: tuple[Role, ...] = ("actor", "old_actor")  # models that the engine serves or has served


@dataclass(frozen=True)
class MegatronHooks:
    """User functions that the Megatron backend calls, with `args` bound.

    initialized(): Megatron-core's groups exist. provider(pre_process=, post_process=, vp_stage=) returns a model chunk.
    before_log_probs(chunks, store_prefix): before a log-prob pass; the prefix is "" for the policy, "ref_" for the
    reference. before_step(rollout_id, step_id, chunks, optimizer, schedule): gradients are zero.
    """

    initialized: Callable[[], object] | None = None
    provider: Callable[..., Any] | None = None
    before_log_probs: Callable[[Sequence[Any], str], object] | None = None
    before_step: Callable[[int, int, Sequence[Any], Any, Any], object] | None = None


@dataclass(frozen=True)
class RoleSettings:
    """Where a trained model other than the policy starts, its optimizer flags, and what is not trained.

    folder: a Hugging Face folder or a checkpoint. A critic's head is new if the folder has none. freeze: regular
    expressions of parameter names.
    """

    folder: Path
    optim: OptimFlags
    freeze: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """Settings of every backend; `megatron` is read by the Megatron backend only.

    Raises ConfigError for a dtype that cannot be trained in, and for optimizer offload on a CPU.
    """

    hf_checkpoint: Path
    """Hugging Face folder of the trained model."""
    initial_weights: Path | None = None
    """Initial policy weights, if not `hf_checkpoint`: a Hugging Face folder, or a checkpoint written by a backend."""
    initial_optimizer: Path | None = None
    """Megatron-LM checkpoint from which master weights, moments and step count are loaded (Megatron backend only)."""
    role_folders: Mapping[Role, Path] = field(default_factory=dict[Role, Path])
    """Folders of the frozen models. `ref` defaults to `hf_checkpoint`."""
    trained: Mapping[Role, RoleSettings] = field(default_factory=dict[Role, RoleSettings])
    """The trained models besides the policy."""
    shares_device: bool = False
    """Keep only the model that runs on the device, and the others in host memory."""
    dtype: torch.dtype = torch.float32
    """Dtype of forward and backward. With bfloat16, master weights, gradient sums and moments are float32."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    temperature: float = 1.0
    """Sampling temperature of the rollout, applied to the policy's logits."""
    total_steps: int | None = None
    """Optimizer steps of the run: the default end of the learning rate decay."""
    engine_quantization: QuantizationScheme | None = None
    """How `hf_checkpoint`, the engine's model, is quantized."""
    int4_qat: bool = False
    """Compute with the values that the engine's INT4 weights have, in all models of the run."""
    check_finite: bool = True
    """Raise TrainerError for a non-finite loss or gradient; if False, skip the step."""

    train: TrainFlags = field(default_factory=TrainFlags)
    optim: OptimFlags = field(default_factory=OptimFlags)
    moe: MoeFlags = field(default_factory=MoeFlags)
    megatron: MegatronFlags = field(default_factory=MegatronFlags)
    checkpoint: CheckpointFlags = field(default_factory=CheckpointFlags)
    hooks: MegatronHooks = field(default_factory=MegatronHooks)

    def __post_init__(self) -> None:
        """Reject what no backend supports."""
        if self.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ConfigError(
                f"training in {self.dtype} needs loss scaling, which is not implemented; use --bf16 or --fp32"
            )
        if problem := offload_problem(self.optim, self.device.type):
            raise ConfigError(problem)

    @property
    def fake_quantization(self) -> QuantizationScheme | None:
        """What weights are rounded to in training; None to compute with the weights themselves."""
        return self.engine_quantization if self.int4_qat else None

    @property
    def offload(self) -> Offload:
        """Optimizer tensors that are kept on the host between steps."""
        if self.optim.optimizer_cpu_offload:
            return "all"
        return "moments" if self.optim.offload_optimizer_states else "nothing"

    @property
    def routing_replay(self) -> Replay:
        """Source of the expert choices in the passes of the policy (not of the reference or a teacher).

        "none": the routers. "policy" (R2): the routers in the log-prob pass before the first optimizer step. "rollout"
        (R3): the engine during generation, for log-prob passes and training. Gating weights always come from the
        routers, so routers are trained. Choices recorded by the engine are compared with the routers' in any case.
        """
        if self.moe.use_rollout_routing_replay:
            return "rollout"
        return "policy" if self.moe.use_routing_replay else "none"

    def replays(self, micro: MicroBatch) -> bool:
        """Return whether a pass replays choices. Raises TrainerError if the engine's choices are missing."""
        if self.routing_replay == "rollout" and micro.routed_experts_TLK is None:
            raise TrainerError(
                "--use-rollout-routing-replay: the batch has no routed experts; the engine must return them, and a "
                "custom generate or rollout function, or a dump, must keep them in Sample.rollout_routed_experts"
            )
        return self.routing_replay == "rollout" or (self.routing_replay == "policy" and micro.policy_routes is not None)

    @property
    def compile_layers(self) -> bool | None:
        """Whether to compile the decoder layers; None decides by model size."""
        return {"auto": None, "on": True, "off": False}[self.train.compile_layers]


ONLY_TRAIN_FLAG, FREEZE_FLAG = "--only-train-params-name-list", "--freeze-params-name-list"
CRITIC_FREEZE_FLAG = "--critic-freeze-params-name-list"
NOTHING_TRAINED = (
    f"no parameter is trained; check {ONLY_TRAIN_FLAG} and {FREEZE_FLAG}, or for a critic {CRITIC_FREEZE_FLAG}"
)


def matching_names(names: Sequence[str], patterns: Sequence[str], flag: str) -> set[str]:
    """Return the parameter names in which one of the regular expressions of `flag` matches.

    Raises ConfigError for an expression that does not compile or matches no name.
    """
    matched: set[str] = set()
    for pattern in patterns:
        try:
            matches = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ConfigError(f"{flag}: {pattern!r} is not a regular expression: {error}") from error
        if not matches:
            raise ConfigError(f"{flag}: {pattern!r} matches no parameter; names look like {', '.join(names[:3])}")
        matched |= matches
    return matched
