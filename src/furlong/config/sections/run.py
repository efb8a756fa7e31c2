"""Flags of the run itself: checkpoints, logging, faults and debugging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class CheckpointFlags:
    """Saving, resuming and loading checkpoints."""

    save: str | None = flag(None, "Directory to write checkpoints to.", metavar="DIR")
    save_interval: int | None = flag(
        None,
        "Rollouts between checkpoints. Default with --num-rollout: one checkpoint at the end.",
        within="[1, inf)",
        needs="save or save_hf",
    )
    save_hf: str | None = flag(
        None,
        "Directory for the trained model in Hugging Face format, written at the end of the run; with `{rollout_id}` in "
        "it, which is replaced, at every checkpoint. Default: `model` in the run directory.",
        metavar="DIR",
    )
    save_model: bool = flag(
        True, "Do not write the trained model to the run directory.", name="--no-save-model", excludes="save_hf"
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
    save_retain_interval: int | None = flag(
        None,
        "Keep only the newest checkpoint and those of steps that are a multiple of this. Default: all.",
        within="[1, inf)",
        needs="save",
        excludes="keep_checkpoints",
    )
    load: str | None = flag(
        None,
        "Checkpoint directory to resume from, or initial weights: in Hugging Face or Megatron-LM format, or the name "
        "of a model on the Hub.",
        hub="model",
        metavar="DIR",
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
    allow_changed_inputs: tuple[str, ...] = flag(
        (),
        "Resume although these inputs differ from those that the checkpoint was saved with; events.jsonl records the "
        "changes.",
        needs="load",
        excludes="finetune",
        choices=("data", "tokenizer", "chat-template", "config", "weights", "reference"),
    )
    no_load_rng: bool = flag(False, "Do not load the random states.", needs="load")
    ref_load: str | None = flag(
        None,
        "Reference model: a checkpoint directory, a Megatron-LM checkpoint, a Hugging Face model or the name of one on "
        "the Hub. Default: --hf-checkpoint. Without a KL term it gives the initial weights, unless --load does.",
        hub="model",
        metavar="DIR",
    )
    dequantize: bool = flag(
        False,
        "Train from the quantized weights of --hf-checkpoint, --load or --ref-load, made whole. Without it, a "
        "quantized --hf-checkpoint is for the engines, and --load or --ref-load give the trainer's weights.",
    )
    ref_ckpt_step: int | None = flag(
        None,
        "Step of the checkpoint to load from --ref-load. Default: the newest.",
        within="[0, inf)",
        needs="ref_load",
    )


@dataclass(frozen=True)
class TrackFlags:
    """Run directory, logging and metrics. `metrics.jsonl` is always written."""

    run_name: str | None = flag(
        None, "Name of the run. Default: the last part of --output-dir, else made of algorithm and model."
    )
    output_dir: str | None = flag(None, "Run directory. Default: outputs/RUN_NAME.", metavar="DIR")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = flag("INFO", "Log level.")
    log_passrate: bool = flag(False, "Report pass@k of every rollout.")
    log_multi_turn: bool = flag(False, "Report the number of turns and observation lengths of multi-turn samples.")
    log_correct_samples: bool = flag(False, "Report lengths of correct samples separately.")
    log_reward_category: str | None = flag(None, "Key of an object reward whose values are counted.")
    log_samples: int | None = flag(
        None,
        "Number of samples of each rollout and evaluation to show as a table in TensorBoard, W&B, Trackio, MLflow and "
        "SwanLab, where they are uploaded. Default: none.",
        within="[1, inf)",
    )
    use_tensorboard: bool = flag(True, "Write TensorBoard files to the run directory.", kind="tristate")
    tb_project_name: str | None = flag(None, "Directory of TensorBoard runs.", needs="use_tensorboard")
    tb_experiment_name: str | None = flag(None, "Name of the run in TensorBoard.", needs="use_tensorboard")
    use_wandb: bool = flag(False, "Report metrics to Weights & Biases.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None, "W&B mode. Default: W&B's own environment variables decide.", needs="use_wandb"
    )
    wandb_dir: str | None = flag(None, "Directory of W&B's files.", needs="use_wandb")
    wandb_key: str | None = flag(
        None,
        "W&B API key; never written to a file. Prefer the environment variable WANDB_API_KEY.",
        needs="use_wandb",
        secret=True,
    )
    wandb_host: str | None = flag(None, "URL of the W&B server.", needs="use_wandb")
    wandb_team: str | None = flag(None, "W&B entity.", needs="use_wandb")
    wandb_project: str | None = flag(None, "W&B project.", needs="use_wandb")
    wandb_group: str | None = flag(None, "W&B group. Default: --run-name.", needs="use_wandb")
    wandb_run_id: str | None = flag(None, "W&B run to continue.", needs="use_wandb")
    wandb_random_suffix: bool = flag(True, "Do not append a random suffix to the W&B group.", needs="use_wandb")
    wandb_always_use_train_step: bool = flag(
        False, "Use the optimizer step as the x-axis of all metrics.", needs="use_wandb"
    )
    use_trackio: bool = flag(False, "Record metrics with Trackio, on this machine.")
    use_mlflow: bool = flag(False, "Record metrics with MLflow.")
    use_swanlab: bool = flag(False, "Record metrics with SwanLab.")
    tracker_project: str = flag(
        "furlong",
        "Project in Trackio and SwanLab, experiment in MLflow.",
        needs="use_trackio or use_mlflow or use_swanlab",
    )
    mlflow_tracking_uri: str | None = flag(
        None, "MLflow's server or database. Default: MLflow's own environment variables decide.", needs="use_mlflow"
    )
    swanlab_mode: Literal["local", "offline", "online", "disabled"] = flag(
        "local", "SwanLab mode; online needs an account.", needs="use_swanlab"
    )


@dataclass(frozen=True)
class FaultFlags:
    """Reactions to bad data, timeouts, failing engines, hangs and diagnoses."""

    use_fault_tolerance: bool = flag(
        False,
        "Restart an engine that died or hangs, update its weights and send its requests to the others meanwhile. "
        "Without this flag a failed engine ends the run.",
        needs="rollout_num_gpus",
    )
    rollout_health_check_interval: float = flag(
        30.0, "Seconds between health checks of an engine.", within="(0, inf)", needs="use_fault_tolerance"
    )
    rollout_health_check_timeout: float = flag(
        30.0, "Timeout of a health check, in seconds.", within="(0, inf)", needs="use_fault_tolerance"
    )
    rollout_health_check_first_wait: float = flag(
        0.0,
        "Seconds between the start of an engine and its first health check.",
        within="[0, inf)",
        needs="use_fault_tolerance",
    )
    rollout_max_engine_restarts: int = flag(
        10, "Maximum number of engine restarts per run.", within="[0, inf)", needs="use_fault_tolerance"
    )
    skip_bad_rows: bool = flag(False, "Skip and count rows that cannot be used. Without this flag they are an error.")
    reward_timeout: float = flag(30.0, "Timeout of a reward call, in seconds.", within="(0, inf)")
    generate_timeout: float | None = flag(
        None,
        "Timeout of the generation of one sample, in seconds: the sample fails, and an agent counts as crashed. "
        "--episode-timeout ends an episode and trains on what it sampled. Default: no timeout.",
        within="(0, inf)",
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "Skip and count optimizer steps with a non-finite gradient. Without this flag such a step is an error.",
        name="--no-check-for-nan-in-loss-and-grad",
    )
    skip_self_test: bool = flag(False, "Do not compare the log-probs of engine and trainer on the first batches.")
    hang_timeout: float = flag(
        3600.0,
        "Seconds without progress (a step, group, micro-batch or updated tensor) after which the stacks of all "
        "processes are written to the run directory; 0 disables the check. Choose more than the longest step on your "
        "machines.",
        within="[0, inf)",
    )
    on_hang: Literal["warn", "stop-user-code", "stop"] = flag(
        "stop-user-code",
        "Action on a hang: `warn` logs it; `stop` also ends the run, with a checkpoint of the last step if --save is "
        "given and no rollout is in flight ahead of training; `stop-user-code` ends it if it waits for a function of "
        "yours.",
        needs="hang_timeout",
    )
    on_diagnosis: Literal["warn", "stop", "strict"] = flag(
        "warn",
        "Action on a diagnosis during the run: `warn` logs it; `stop` ends the run after the current step on an "
        "error, `strict` on a warning too.",
    )


@dataclass(frozen=True)
class DebugFlags:
    """Dumps, replay, profiling, tracing and determinism checks."""

    strict_flags: bool = flag(
        False, "Refuse flags of slime that are otherwise accepted with a line that says what happens instead."
    )
    ci_test: bool = flag(
        False,
        "Accepted for slime compatibility; no effect: nothing is asserted during a run.",
        instead="nothing is asserted during a run; read its metrics.jsonl",
    )
    debug_rollout_only: bool = flag(
        False,
        "Only generate and score; the trainer is not created.",
        excludes="debug_train_only load_debug_rollout_data",
    )
    debug_train_only: bool = flag(
        False,
        "Only train, on --load-debug-rollout-data; no engine is created.",
        needs="load_debug_rollout_data or loss_type=sft_loss",
    )
    save_debug_rollout_data: str | None = flag(
        None, "File for the samples of each rollout (safetensors); `{rollout_id}` is replaced.", metavar="FILE"
    )
    keep_samples: int = flag(
        20,
        "Rollouts, and evaluations, whose samples stay in samples/ in the run directory for furlong view: the newest, "
        "each up to one million tokens; 0 keeps none. No effect with --save-debug-rollout-data, which keeps all.",
        within="[0, inf)",
    )
    load_debug_rollout_data: str | None = flag(
        None,
        "File of samples to train on instead of generating; `{rollout_id}` is replaced. Sets --debug-train-only.",
        metavar="FILE",
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "Fraction of those samples to use.", within="(0, 1]", needs="load_debug_rollout_data"
    )
    save_debug_train_data: str | None = flag(
        None,
        "File for the training batch of each rollout; `{rollout_id}` is replaced, and `{rank}` by the rank, as each "
        "rank writes its own part.",
        metavar="FILE",
    )
    dump_details: str | None = flag(None, "Directory for both dumps: samples and training batches.", metavar="DIR")
    debug_rollout_print_every: int | None = flag(
        None, "Rollouts between samples that are logged in full.", within="[1, inf)"
    )
    trace: bool = flag(
        False,
        "Record what each process does over time, in trace.json in the run directory; open it in ui.perfetto.dev.",
    )
    use_pytorch_profiler: bool = flag(
        False, "Profile training with PyTorch's profiler; results are in profile/ in the run directory."
    )
    profile_target: tuple[str, ...] = flag(
        ("train_overall",),
        "What to profile: train_overall (the whole training round), train_actor (the optimizer steps), "
        "train_log_probs.",
        needs="use_pytorch_profiler",
    )
    profile_step_start: int = flag(
        1,
        "First rollout to profile; the first of a run includes warm-up.",
        within="[0, inf)",
        needs="use_pytorch_profiler",
        bound="< profile_step_end",
    )
    profile_step_end: int = flag(
        2, "Rollout before which profiling ends.", within="[1, inf)", needs="use_pytorch_profiler"
    )
    record_memory_history: bool = flag(
        False, "Record GPU memory allocations in profile/; view them at pytorch.org/memory_viz."
    )
    memory_snapshot_num_steps: int = flag(
        1,
        "Number of rollouts after which the memory snapshot is written.",
        within="[1, inf)",
        needs="record_memory_history",
    )
    debug_weight_sync: int = flag(0, "1 logs every tensor of a weight update with its checksum.", within="[0, 1]")
    debug_determinism: bool = flag(
        False,
        "Write hashes of data order, tokens, log-probs, advantages, loss, gradients and parameters of each step to "
        "determinism.jsonl; `furlong diff` compares two runs.",
    )
    check_weight_update_equal: bool = flag(
        False, "Update weights twice at start-up and fail if any tensor in the engine differs."
    )
