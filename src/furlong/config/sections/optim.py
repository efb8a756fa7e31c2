"""The optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class OptimFlags:
    """The optimizer and its schedule. The schedule counts optimizer steps."""

    optimizer: Literal["adam", "sgd"] = flag("adam", "`adam` is AdamW (decoupled weight decay).")
    lr: float = flag(1e-6, "Learning rate.", within="[0, inf)")
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.", within="[0, inf)")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = flag(
        "constant", "How the learning rate falls after the warm-up."
    )
    lr_decay_iters: int | None = flag(
        None, "Optimizer steps until --min-lr. Without it: all steps of the run.", within="[1, inf)"
    )
    lr_warmup_iters: int = flag(0, "Optimizer steps over which the learning rate rises to --lr.", within="[0, inf)")
    lr_warmup_fraction: float | None = flag(
        None, "The same as a fraction of --lr-decay-iters; excludes --lr-warmup-iters.", within="[0, 1]"
    )
    lr_warmup_init: float = flag(0.0, "Learning rate before the first step of the warm-up.", within="[0, inf)")
    weight_decay: float = flag(0.01, "Decoupled weight decay.", within="[0, inf)")
    adam_beta1: float = flag(0.9, "Decay of Adam's first moment.", within="[0, 1)")
    adam_beta2: float = flag(0.999, "Decay of Adam's second moment.", within="[0, 1)")
    adam_eps: float = flag(1e-8, "Added to the root of Adam's second moment.", within="(0, inf)")
    clip_grad: float = flag(1.0, "Largest global gradient norm; 0 does not clip.", within="[0, inf)")
    reset_optimizer_states: bool = flag(False, "Start every rollout with a fresh optimizer.")
    offload_optimizer_states: bool = flag(
        False, "Keep the optimizer's moments in host memory between steps: 8 bytes a parameter less on the GPU."
    )
    optimizer_cpu_offload: bool = flag(
        False,
        "Keep in host memory between steps all that only a step needs, the moments and, where they are not the weights "
        "themselves, float32 masters: 12 bytes a parameter less beside activations. Steps are taken on the GPU.",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False,
        "Taken since it changes nothing: what comes to the GPU for a step comes without being waited for one by one.",
        needs="optimizer_cpu_offload",
    )
    use_distributed_optimizer: bool = flag(
        False, "Taken since it changes nothing: training processes share the optimizer's states without it."
    )
    use_precision_aware_optimizer: bool = flag(
        False, "Taken since it changes nothing: its precisions are float32, and flags for others are not taken."
    )
    use_stateless_adam: bool = flag(
        False, "Keep no moments between steps; wants --optimizer adam and --no-save-optim.", needs="no_save_optim"
    )
