"""What a run leaves behind and starts from: checkpoints, metrics, dumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag import flag


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


@dataclass(frozen=True)
class TrackFlags:
    """The run's folder and its metrics. `metrics.jsonl` is always written."""

    run_name: str | None = flag(None, "The run's name. Without it: made of algorithm and model, or of --output-dir.")
    output_dir: str | None = flag(None, "The run's folder. Without it: outputs/RUN_NAME.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = flag("INFO", "What the log shows.")
    log_passrate: bool = flag(False, "Report pass@k of every rollout.")
    log_multi_turn: bool = flag(False, "Report turns and observation lengths of agent samples.")
    log_correct_samples: bool = flag(False, "Report lengths of the samples that were right, separately.")
    log_reward_category: str | None = flag(None, "Entry of an object reward whose values are counted.")
    use_tensorboard: bool = flag(True, "Write TensorBoard files into the run's folder.", kind="tristate")
    tb_project_name: str | None = flag(None, "Folder of TensorBoard runs.", needs="use_tensorboard")
    tb_experiment_name: str | None = flag(None, "Name of the run in TensorBoard.", needs="use_tensorboard")
    use_wandb: bool = flag(False, "Report to Weights & Biases.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None, "Where W&B keeps the run. Without it: as W&B's own environment says.", needs="use_wandb"
    )
    wandb_dir: str | None = flag(None, "Folder of W&B's files.", needs="use_wandb")
    wandb_key: str | None = flag(
        None, "W&B API key; not written to any file. Better: WANDB_API_KEY.", needs="use_wandb", secret=True
    )
    wandb_host: str | None = flag(None, "Address of the W&B server.", needs="use_wandb")
    wandb_team: str | None = flag(None, "W&B entity.", needs="use_wandb")
    wandb_project: str | None = flag(None, "W&B project.", needs="use_wandb")
    wandb_group: str | None = flag(None, "W&B group. Without it: --run-name.", needs="use_wandb")
    wandb_run_id: str | None = flag(None, "W&B run to continue.", needs="use_wandb")
    wandb_random_suffix: bool = flag(True, "Do not add a random suffix to the W&B group.", needs="use_wandb")
    wandb_always_use_train_step: bool = flag(
        False, "Use the optimizer step as the x-axis of every metric.", needs="use_wandb"
    )


@dataclass(frozen=True)
class DebugFlags:
    """Parts of the loop on their own, dumps and replays."""

    debug_rollout_only: bool = flag(False, "Generate and score only; no trainer is built.")
    debug_train_only: bool = flag(False, "Train only, on --load-debug-rollout-data; no engine is built.")
    save_debug_rollout_data: str | None = flag(
        None, "File for each rollout's samples (safetensors); `{rollout_id}` is replaced."
    )
    load_debug_rollout_data: str | None = flag(
        None, "File of samples to train on in place of generating; `{rollout_id}` is replaced. Sets --debug-train-only."
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "Fraction of those samples that is used.", within="(0, 1]", needs="load_debug_rollout_data"
    )
    save_debug_train_data: str | None = flag(
        None,
        "File for each rollout's training batch; `{rollout_id}` is replaced, and `{rank}` by the training process, "
        "each of which writes what it trains on.",
    )
    dump_details: str | None = flag(None, "Folder that both dumps go to.")
    debug_rollout_print_every: int | None = flag(
        None, "Rollouts between two samples that are logged in full.", within="[1, inf)"
    )
    trace: bool = flag(
        False, "Write what every process does when, to trace.json in the run's folder; open it in ui.perfetto.dev."
    )
    use_pytorch_profiler: bool = flag(
        False, "Profile training with PyTorch's profiler, into profile/ in the run's folder."
    )
    profile_target: tuple[str, ...] = flag(
        ("train_overall",),
        "What to profile: train_overall (the whole round), train_actor (the optimizer steps), train_log_probs.",
        needs="use_pytorch_profiler",
    )
    profile_step_start: int = flag(
        1,
        "First rollout that is profiled; the first one of all has warm-up in it.",
        within="[0, inf)",
        needs="use_pytorch_profiler",
    )
    profile_step_end: int = flag(
        2, "Rollout before which profiling ends.", within="[1, inf)", needs="use_pytorch_profiler"
    )
    record_memory_history: bool = flag(
        False, "Record who allocates what on the GPU, into profile/; view it at pytorch.org/memory_viz."
    )
    memory_snapshot_num_steps: int = flag(
        1, "Rollouts after which the memory snapshot is written.", within="[1, inf)", needs="record_memory_history"
    )
    debug_weight_sync: int = flag(0, "1 logs every tensor of a publication with its checksum.", within="[0, 1]")
    debug_determinism: bool = flag(
        False,
        "Write hashes of data order, tokens, log-probs, advantages, loss, gradients and parameters of each step to "
        "determinism.jsonl; `furlong diff` compares two runs.",
    )
    replay: str | None = flag(
        None,
        "Folder of a run whose order of completion is followed, so that an asynchronous run is repeated bit for bit.",
    )
    check_weight_update_equal: bool = flag(
        False, "Publish twice at the start; a tensor that the engine held otherwise in between is an error."
    )
