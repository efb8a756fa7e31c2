"""The settings of the critic: --critic-* and the entries of --megatron-config-path."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from furlong.config.config_file import read_yaml
from furlong.config.flag_spec import flag_specs
from furlong.config.flag_values import value_from_yaml
from furlong.config.sections import Config, OptimFlags
from furlong.errors import ConfigError

FLAG = "--megatron-config-path"
EXAMPLE = "megatron: [{name: default, role: critic, overrides: {lr: 1e-5}}]"
IGNORED = ("num_nodes", "num_gpus_per_node")  # as in slime: GPUs follow the command line
PARALLEL = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
)


@dataclass(frozen=True)
class CriticSettings:
    """Where the critic starts (None: as the policy), where it is exported to, and its optimizer."""

    load: str | None
    save: str | None
    optim: OptimFlags


def critic_settings(config: Config) -> CriticSettings:
    """Return the critic's settings. Raises ConfigError for a file of --megatron-config-path that is not usable."""
    algo = config.algo
    overrides = role_overrides(config, "critic")
    load, save = overrides.pop("load", algo.critic_load), overrides.pop("save", algo.critic_save)
    values: dict[str, Any] = {"lr": config.optim.lr if algo.critic_lr is None else algo.critic_lr}
    values |= {"lr_warmup_iters": algo.critic_lr_warmup_iters}
    if algo.critic_lr_warmup_iters:
        values["lr_warmup_fraction"] = None
    for name in ("lr_decay_iters", "lr_wsd_decay_iters"):  # of the command line: steps of the policy
        if (steps := getattr(config.optim, name)) is not None:
            values[name] = steps * algo.critic_steps_per_rollout
    optim = dataclasses.replace(config.optim, **(values | overrides))
    if optim.min_lr > optim.lr >= 0:
        raise ConfigError(
            f"the critic's learning rate {optim.lr:g} is below --min-lr {optim.min_lr:g}; raise --critic-lr, or give "
            f"the critic its own min_lr in {FLAG}"
        )
    other = config.checkpoint
    if save not in (None, algo.critic_save) and other.save is None:
        raise ConfigError(f"{FLAG} gives the critic save {save}, which is written with checkpoints only; add --save")
    folders = {"--save": other.save, "--save-hf": other.save_hf, "--hf-checkpoint": config.rollout.hf_checkpoint}
    for flag, path in folders.items():
        if save is not None and path is not None and Path(save).resolve() == Path(path).resolve():
            raise ConfigError(
                f"the critic is saved to {save}, the folder of {flag}: one would overwrite the other; use another "
                f"folder, such as --critic-save {save}_critic"
            )
    return CriticSettings(load, save, optim)


def role_overrides(config: Config, role: Literal["actor", "critic"]) -> dict[str, Any]:
    """Return the overrides of a role in --megatron-config-path by field: flags of the optimizer, `load` and `save`.

    Raises ConfigError for a file that is not usable, an unknown role or field, or another parallel layout.
    """
    if (path := config.algo.megatron_config_path) is None:
        return {}
    entries = [entry for entry in _entries(path) if entry["role"] == role]
    if len(entries) > 1:
        raise ConfigError(f"{FLAG} {path} has {len(entries)} entries with role {role}; give one")
    given: Any = (entries[0].get("overrides") or entries[0].get("args") or {}) if entries else {}
    if not isinstance(given, dict):
        raise ConfigError(f"{FLAG} {path}: overrides of the {role} are {given!r}, expected a mapping, as in {EXAMPLE}")
    specs, allowed = flag_specs(Config), {field.name for field in dataclasses.fields(OptimFlags)}
    overrides: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", given).items():
        if name in IGNORED:
            continue
        if name in PARALLEL:
            if value != specs[name].value_in(config):
                raise ConfigError(
                    f"{FLAG} {path}: {name} {value} of the {role} differs from the run's "
                    f"{specs[name].value_in(config)}; policy and critic share the parallel layout, so remove it"
                )
        elif name in ("load", "save"):
            overrides[name] = None if value is None else str(value)
        elif name not in allowed:
            raise ConfigError(
                f"{FLAG} {path}: {name} of the {role} cannot be overridden; use load, save or a flag of the optimizer: "
                f"{', '.join(sorted(allowed))}"
            )
        else:
            spec = specs[name]
            try:
                overrides[name] = value_from_yaml(spec, value)
            except ValueError as error:
                raise ConfigError(f"{FLAG} {path}: {name} of the {role}: {error}") from error
            if spec.within is not None and overrides[name] not in spec.within:
                raise ConfigError(
                    f"{FLAG} {path}: {name} {value} of the {role} is outside of {spec.within.text}; {spec.within.fix}"
                )
    return overrides


def _entries(path: str) -> list[dict[str, Any]]:
    content: Any = read_yaml(path, f"{FLAG} {path}", form=f"a file such as {EXAMPLE}")
    entries: Any = cast("dict[str, Any]", content).get("megatron") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in cast("list[Any]", entries)):
        raise ConfigError(f"{FLAG} {path} has no list 'megatron'; a valid file is {EXAMPLE}")
    named = cast("list[dict[str, Any]]", entries)
    for entry in named:
        if entry.get("role") not in ("actor", "critic"):
            raise ConfigError(f"{FLAG} {path}: role {entry.get('role')!r} is unknown; use actor or critic")
    return named
