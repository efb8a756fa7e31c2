"""Flags of the section `optim`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class OptimFlags:
    """Optimizer and learning-rate schedule. The schedule counts optimizer steps."""

    optimizer: Literal["adam", "sgd"] = flag("adam", "Optimizer; `adam` is AdamW (decoupled weight decay).")
    lr: float = flag(1e-6, "Learning rate.", within="[0, inf)")
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.", within="[0, inf)")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = flag(
        "constant", "Shape of the learning-rate decay after the warm-up."
    )
    lr_decay_iters: int | None = flag(
        None, "Optimizer steps until --min-lr is reached. Default: all steps of the run.", within="[1, inf)"
    )
    lr_warmup_iters: int = flag(0, "Optimizer steps over which the learning rate rises to --lr.", within="[0, inf)")
    lr_warmup_fraction: float | None = flag(
        None, "Length of the warm-up as a fraction of --lr-decay-iters.", within="[0, 1]", excludes="lr_warmup_iters"
    )
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.", within="[0, inf)")
    weight_decay: float = flag(0.01, "Decoupled weight decay.", within="[0, inf)")
    adam_beta1: float = flag(0.9, "Decay rate of Adam's first moment.", within="[0, 1)")
    adam_beta2: float = flag(0.999, "Decay rate of Adam's second moment.", within="[0, 1)")
    adam_eps: float = flag(1e-8, "Epsilon in the denominator of Adam's update.", within="(0, inf)")
    clip_grad: float = flag(1.0, "Maximum global gradient norm; 0 disables clipping.", within="[0, inf)")
    reset_optimizer_states: bool = flag(False, "Reset the optimizer states at every rollout.")
    offload_optimizer_states: bool = flag(
        False, "Keep Adam's moments in host memory between steps: saves 8 bytes of GPU memory per parameter."
    )
    optimizer_cpu_offload: bool = flag(
        False,
        "Keep moments and float32 master weights in host memory between steps: saves 12 bytes of GPU memory per "
        "parameter. Steps are computed on the GPU.",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, "Accepted for slime compatibility; no effect (copies always overlap).", needs="optimizer_cpu_offload"
    )
    use_distributed_optimizer: bool = flag(
        False,
        "Accepted for slime compatibility; no effect (optimizer states are always sharded over the trainer processes).",
    )
    use_precision_aware_optimizer: bool = flag(
        False, "Accepted for slime compatibility; no effect (optimizer states are always float32)."
    )
    use_stateless_adam: bool = flag(
        False, "Keep no moments between steps. Requires --optimizer adam.", needs="no_save_optim; optimizer=adam"
    )
