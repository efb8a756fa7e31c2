"""Metrics, logs and the folder of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


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
