"""Flags of the section `track`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class TrackFlags:
    """Run directory, logging and metrics. `metrics.jsonl` is always written."""

    run_name: str | None = flag(
        None, "Name of the run. Default: the last part of --output-dir, else made of algorithm and model."
    )
    output_dir: str | None = flag(None, "Run directory. Default: outputs/RUN_NAME.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = flag("INFO", "Log level.")
    log_passrate: bool = flag(False, "Report pass@k of every rollout.")
    log_multi_turn: bool = flag(False, "Report the number of turns and observation lengths of multi-turn samples.")
    log_correct_samples: bool = flag(False, "Report lengths of correct samples separately.")
    log_reward_category: str | None = flag(None, "Key of an object reward whose values are counted.")
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
