"""Tracker for Weights & Biases, an optional dependency."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from furlong.config.sections import TrackFlags
from furlong.errors import ConfigError
from furlong.tracking.optional_package import finite, import_optional
from furlong.tracking.sample_tables import COLUMNS, TRAINED, SampleTable

_SECTIONS = {
    "train": "train/step",
    "rollout": "rollout/step",
    "multi_turn": "rollout/step",
    "passrate": "rollout/step",
    "perf": "rollout/step",
    "eval": "eval/step",
}


class WandbTracker:
    """Reports to one W&B run, with slime's x-axes: `train/step`, `rollout/step` and `eval/step`.

    The group gets a random suffix unless --wandb-run-id continues a run. The key is only passed to W&B's login. Raises
    ConfigError if wandb is not installed or rejects the settings.
    """

    def __init__(self, flags: TrackFlags, config: Mapping[str, Any] | None = None) -> None:
        wandb = import_optional("wandb", "--use-wandb")
        if flags.wandb_dir is not None:
            Path(flags.wandb_dir).mkdir(parents=True, exist_ok=True)
        group, run_id = flags.wandb_group, flags.wandb_run_id
        suffix = f"_{uuid.uuid4().hex[:8]}" if group and flags.wandb_random_suffix and run_id is None else ""
        name = f"{group}{suffix}" if group else None
        try:
            if flags.wandb_key is not None and flags.wandb_mode not in ("offline", "disabled"):
                wandb.login(key=flags.wandb_key, host=flags.wandb_host)
            self._run = wandb.init(
                project=flags.wandb_project,
                entity=flags.wandb_team,
                group=name,
                name=name,
                mode=flags.wandb_mode,
                dir=flags.wandb_dir,
                id=run_id,
                resume="allow" if run_id else None,
                config=dict(config or {}),
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(f"--use-wandb: {error}; or pass --wandb-mode offline") from error
        axes = dict.fromkeys(_SECTIONS, "train/step") if flags.wandb_always_use_train_step else _SECTIONS
        self._axes, self._table = axes, wandb.Table
        for section, axis in axes.items():
            self._run.define_metric(axis)
            self._run.define_metric(f"{section}/*", step_metric=axis)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Report one step, without non-finite values, which W&B cannot plot."""
        record: dict[str, float] = finite(metrics)
        sections = {name.split("/", 1)[0] for name in record}
        for axis in {_SECTIONS[section] for section in sections if section in _SECTIONS} | {"train/step"}:
            record.setdefault(axis, step)
        self._run.log(record)

    def log_samples(self, table: SampleTable) -> None:
        """Report a table of samples at its step."""
        shown = self._table(columns=list(COLUMNS), data=table.rows, allow_mixed_types=True)
        axis = self._axes["rollout" if table.name == TRAINED else "eval"]
        self._run.log({table.key: shown, axis: table.step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
