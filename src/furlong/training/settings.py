"""What a trainer is given: what every backend takes, what each takes beside it, and what a rank does in a rollout.

`wiring.training_parts` makes them of the flags. A rank's place among the processes that train is apart: `training.ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from furlong.config.sections.optim import OptimFlags
from furlong.errors import ConfigError
from furlong.interfaces import Role
from furlong.training.megatron.parallel_layout import Compute, Layout
from furlong.training.router_balance import Balancing
from furlong.training.routing_replay import Replay

Offload = Literal["nothing", "moments", "all"]


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """What every backend takes. Raises ConfigError for a precision or an offload that no backend has there."""

    # -- the model
    hf_checkpoint: Path
    """The Hugging Face folder of the model that is trained."""
    first_weights: Path | None = None
    """What the policy starts with in place of `hf_checkpoint`: such a folder, or what a backend's `save` wrote."""
    role_folders: Mapping[Role, Path] = field(default_factory=dict[Role, Path])
    """Where frozen models come from, such folders, too; without one for `ref` it is `hf_checkpoint`."""
    dtype: torch.dtype = torch.float32
    """Of forward and backward passes. Masters, gradients' sums and moments are in float32 where it is bfloat16."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where this rank computes."""

    # -- forward and backward
    temperature: float = 1.0
    """Of the rollout, for log-probs of the sampled policy."""
    log_probs_chunk_size: int = -1
    """Response tokens whose logits exist at a time; -1 chooses by memory."""
    compile_layers: bool | None = None
    """Compile the decoder layers; None chooses by the model's size."""
    routing_replay: Replay = "none"
    """Whose choice of experts is trained with, see `training.routing_replay`."""
    check_finite: bool = True
    """A loss or gradient that is not finite raises TrainerError; without it such a step is skipped."""

    # -- the optimizer
    optim: OptimFlags
    """The optimizer's flags."""
    total_steps: int | None = None
    """Optimizer steps of the whole run, the default end of the learning rate's decay."""
    train_only: Sequence[str] | None = None
    """Regular expressions over parameter names; only those are trained."""
    freeze: Sequence[str] | None = None
    """Regular expressions over parameter names; those are not trained."""
    offload_optimizer: Offload = "nothing"
    """What of the optimizer is on the host between steps. On a CPU it is there already."""

    # -- checkpoints
    save_optimizer: bool = True
    """Checkpoints hold the moments."""
    load_optimizer: bool = True
    """`load` takes the moments of a checkpoint."""
    load_random: bool = True
    """`load` takes the random states of a checkpoint."""

    def __post_init__(self) -> None:
        """Refuse what no backend does."""
        if self.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ConfigError(f"training in {self.dtype} needs loss scaling, which there is not; use --bf16 or --fp32")
        if self.offload_optimizer != "nothing" and self.device.type == "cpu":
            flag = {"moments": "--offload-optimizer-states", "all": "--optimizer-cpu-offload"}[self.offload_optimizer]
            raise ConfigError(f"{flag} has no effect: training runs on the CPU; remove it")


@dataclass(frozen=True, kw_only=True)
class FsdpSettings:
    """What `training.fsdp.backend` takes beside `BackendSettings`."""

    recompute_activations: bool = False
    """Keep only the inputs of decoder layers for the backward pass."""
    share_prompts: bool = True
    """Run a prompt once for all samples of a micro-batch that start with it."""


@dataclass(frozen=True, kw_only=True)
class MegatronSettings:
    """What `training.megatron` takes beside `BackendSettings`."""

    layout: Layout = field(default_factory=Layout)
    """How the ranks share the model."""
    compute: Compute = field(default_factory=Compute)
    """How layers are computed: recomputation, attention."""
    seed: int = 1234
    """Of Megatron-core's random states, which differ by the place of a rank in the layout."""
    balancing: Balancing = field(default_factory=Balancing)
    """Losses of the routers."""
    grouped_gemm: bool | None = None
    """Multiply all experts of a rank at once; None does in bfloat16."""
    reduce_in_float32: bool = True
    """Sum gradients over ranks in float32, else in the training dtype."""
    overlap_reduce: bool = False
    """Send gradients while the last backward pass runs."""
    first_optimizer: Path | None = None
    """The checkpoint of Megatron-LM whose masters, moments and steps the optimizer starts with."""


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """What `training.worker` does in each rollout beside what the algorithm's flags say."""

    compute_advantages: bool = True
    """Make advantages of rewards. Without it (SFT, or a custom loss that needs none) no log-prob pass is run."""
    max_response_len: int | None = None
    """Tokens of the longest response: what a loss divides by that wants a constant and was given none."""
    ref_update_interval: int | None = None
    """Rollouts after which the reference becomes the policy."""
    reset_optimizer_states: bool = False
    """Forget the moments before each rollout's first step."""
    keep_old_actor: bool = False
    """Clip against the weights that generated the batch, which are kept for one rollout."""
    use_rollout_entropy: bool = False
    """Run the log-prob pass whether needed or not, with entropies."""
    records_routes: bool = False
    """Run the log-prob pass whether needed or not; what its routers chose is handed to the steps."""
