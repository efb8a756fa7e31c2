"""Flags of the section `checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class CheckpointFlags:
    """Saving, resuming and loading checkpoints."""

    save: str | None = flag(None, "Directory to write checkpoints to.")
    save_interval: int | None = flag(
        None, "Rollouts between checkpoints. Default: one checkpoint at the end.", within="[1, inf)", needs="save"
    )
    save_hf: str | None = flag(
        None, "Directory for a Hugging Face model at every checkpoint; `{rollout_id}` is replaced.", needs="save"
    )
    async_save: bool = flag(
        False,
        "Write checkpoints in the background while training continues. Needs host memory for a copy of the state: 12 "
        "bytes per parameter with Adam.",
        needs="save",
    )
    no_save_optim: bool = flag(False, "Do not save the optimizer states.")
    keep_checkpoints: int | None = flag(
        None, "Number of newest checkpoints to keep. Default: all.", within="[1, inf)", needs="save"
    )
    load: str | None = flag(
        None, "Checkpoint directory to resume from, or initial weights in Hugging Face or Megatron-LM format."
    )
    ckpt_step: int | None = flag(
        None, "Step of the checkpoint to load from --load. Default: the newest.", within="[0, inf)", needs="load"
    )
    finetune: bool = flag(
        False,
        "Load only the weights of --load; rollouts, optimizer and random states start anew. From Hugging Face and "
        "Megatron-LM checkpoints only the weights are loaded in any case.",
        needs="load",
    )
    no_load_optim: bool = flag(False, "Do not load the optimizer states; moments start at zero.", needs="load")
    no_load_rng: bool = flag(False, "Do not load the random states.", needs="load")
    ref_load: str | None = flag(
        None,
        "Reference model: a checkpoint directory, a Megatron-LM checkpoint or a Hugging Face model. Default: "
        "--hf-checkpoint.",
    )
    ref_ckpt_step: int | None = flag(
        None,
        "Step of the checkpoint to load from --ref-load. Default: the newest.",
        within="[0, inf)",
        needs="ref_load",
    )
