"""Checkpoints to write and to start from."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class CheckpointFlags:
    """Checkpoints to write and to start from."""

    save: str | None = flag(None, "Folder of the checkpoints to write.")
    save_interval: int | None = flag(
        None, "Rollouts between two checkpoints. Without it: only at the end.", within="[1, inf)", needs="save"
    )
    save_hf: str | None = flag(
        None, "Folder for Hugging Face models at every checkpoint; `{rollout_id}` is replaced.", needs="save"
    )
    async_save: bool = flag(
        False,
        "Write a checkpoint while the run goes on. Costs host memory for a copy of what it holds: 12 bytes a parameter "
        "with Adam's moments.",
        needs="save",
    )
    no_save_optim: bool = flag(False, "Leave the optimizer out of checkpoints.")
    keep_checkpoints: int | None = flag(
        None, "Newest checkpoints that are kept. Without it: all.", within="[1, inf)", needs="save"
    )
    load: str | None = flag(
        None, "Folder of checkpoints to continue from; or weights to start with, from Hugging Face or Megatron-LM."
    )
    ckpt_step: int | None = flag(
        None, "Checkpoint to load from there. Without it: the newest.", within="[0, inf)", needs="load"
    )
    finetune: bool = flag(
        False,
        "Take only the weights of --load: rollouts, optimizer and random states begin anew. Of a Hugging Face folder "
        "and of a Megatron-LM checkpoint nothing else is taken in any case.",
        needs="load",
    )
    no_load_optim: bool = flag(False, "Leave the optimizer of the checkpoint; moments begin at zero.", needs="load")
    no_load_rng: bool = flag(False, "Leave the random states of the checkpoint.", needs="load")
    ref_load: str | None = flag(
        None,
        "Reference model: a checkpoint folder, a Megatron-LM checkpoint or a Hugging Face folder. Without it: "
        "--hf-checkpoint.",
    )
    ref_ckpt_step: int | None = flag(
        None, "Checkpoint to load from --ref-load. Without it: the newest.", within="[0, inf)", needs="ref_load"
    )
