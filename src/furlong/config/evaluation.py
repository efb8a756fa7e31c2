"""Evaluation sets from `--eval-prompt-data NAME FILE ...` or `--eval-config`; values default to those of training.

eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
  datasets:
    - {name: aime, path: aime.jsonl, rm_type: math, max_response_len: 8192}
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from furlong.config.checks.value_checks import prompt_file_problem, set_name_problem, verifier_problem
from furlong.config.command_line import config_from_values
from furlong.config.config_file import read_yaml
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.flag_values import value_from_yaml
from furlong.config.hub import Commits, recorded_commits, resolve_data
from furlong.config.sections import Config
from furlong.core.text import did_you_mean, shortened
from furlong.errors import ConfigError

KEYS = (
    *("name", "path", "input_key", "label_key", "metadata_key", "tool_key", "rm_type", "custom_rm_path"),
    *("custom_generate_function_path", "reward_key", "n_samples_per_eval_prompt", "temperature", "top_p", "top_k"),
    *("min_new_tokens", "max_response_len", "max_prompt_len", "max_context_len", "stop", "stop_token_ids"),
    "metadata_overrides",
)


@dataclass(frozen=True)
class EvalSpec:
    """One evaluation set: `config` is the run's, in which the set's values replace those of training."""

    name: str
    path: str
    config: Config
    metadata_overrides: dict[str, Any] = field(default_factory=dict[str, Any])


def eval_specs(config: Config) -> list[EvalSpec]:
    """Return the evaluation sets of a resolved config. Raises ConfigError with every problem of the file at once."""
    flags = {name: spec.value_in(config) for name, spec in flag_specs(Config).items()}
    set_by_flag = {name: flags[f"eval_{key}"] for key, name in _fields().items() if f"eval_{key}" in flags}
    shared = {name: value for name, value in set_by_flag.items() if value is not None}  # 0 is a value (greedy)
    config = config_from_values(shared, config)
    if config.eval.eval_config is not None:
        return _from_file(Path(config.eval.eval_config), config)
    pairs = config.eval.named_files()
    if len(pairs) % 2:
        raise ConfigError(f"--eval-prompt-data takes pairs NAME FILE, got {len(pairs)} values: {' '.join(pairs)}")
    return [EvalSpec(name, path, config) for name, path in zip(pairs[::2], pairs[1::2], strict=True)]


def _fields() -> dict[str, str]:
    specs = flag_specs(Config)
    return {key: name for key in KEYS for name in (f"rollout_{key}", key) if name in specs}


def used_eval_specs(config: Config) -> list[EvalSpec]:
    """Return the sets that a run evaluates, if any. Raises ConfigError as `eval_specs`."""
    return eval_specs(config) if config.eval.is_used else []


def _from_file(path: Path, config: Config) -> list[EvalSpec]:
    section = _section(path)
    problems = [
        f"--eval-config {path}: unknown key {key!r}; the supported keys are `defaults` and `datasets`"
        for key in section
        if key not in ("defaults", "datasets")
    ]
    shared = section.get("defaults") or {}
    if not isinstance(shared, dict):
        raise ConfigError(f"--eval-config {path}: `defaults` is {shortened(shared)}, expected keys and values")
    specs: list[EvalSpec] = []
    commits = recorded_commits(config)
    for i, row in enumerate(section["datasets"], start=1):
        where = f"--eval-config {path}: dataset {i}"
        if not isinstance(row, dict):
            problems.append(f"{where} is {shortened(row)}, expected keys and values, at least `name` and `path`")
            continue
        where += f" ({row['name']})" if row.get("name") else ""
        values, wrong = _values(where, {**shared, **row}, commits)
        problems += wrong
        if not wrong:
            own = {key: values.pop(key) for key in ("name", "path", "metadata_overrides") if key in values}
            specs.append(EvalSpec(config=config_from_values(values, config), **own))
    names = [spec.name for spec in specs]
    problems += [
        f"--eval-config {path}: the name {name} is used {count} times; give each set a different name"
        for name, count in Counter(names).items()
        if count > 1
    ]
    if problems:
        raise ConfigError(*problems)
    return specs


def _section(path: Path) -> dict[str, Any]:
    form = "`eval: {defaults: ..., datasets: [{name: ..., path: ...}]}`"
    content = read_yaml(path, f"--eval-config {path}", form=form)
    section = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(section, dict) or not isinstance(section.get("datasets"), list):
        raise ConfigError(f"--eval-config {path} contains {_shown(content)}; write {form}")
    if not section["datasets"]:
        raise ConfigError(f"--eval-config {path}: `datasets` is empty; add a set, or remove --eval-config")
    return section


def _values(where: str, row: dict[str, Any], commits: Commits) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    specs, fields = flag_specs(Config), _fields()
    problems = [f"{where} has no `{key}`; add it" for key in ("name", "path") if not row.get(key)]
    for key, value in row.items():
        if key not in KEYS:
            _, hint = did_you_mean(str(key), KEYS)
            problems.append(f"{where} has an unknown key {key!r}; {hint or 'known keys are ' + ', '.join(KEYS)}")
        elif value is None:
            continue
        elif key == "metadata_overrides":
            values[key] = value
            if not isinstance(value, dict):
                problems.append(f"{where}, {key}: got {shortened(value)}, expected keys and values")
        elif key in ("name", "path"):
            if key == "name" and (problem := set_name_problem(f"{where}, name", str(value))):
                problems.append(problem)
            try:
                values[key] = resolve_data(f"{where}, path", str(value), commits) if key == "path" else str(value)
            except ConfigError as error:
                return values, [*problems, *error.problems]
        else:
            try:
                values[fields[key]] = _checked(specs.get(f"eval_{key}", specs[fields[key]]), value)
            except ValueError as error:
                problems.append(f"{where}, {key}: {error}")
    if (path := values.get("path")) and (problem := prompt_file_problem(f"{where}, path", path)):
        problems.append(problem)
    if (name := values.get("rm_type")) and (problem := verifier_problem(f"{where}, rm_type", name)):
        problems.append(problem)
    if name and "custom_rm_path" not in values:  # the run's function would take precedence
        values |= {"custom_rm_path": None, "group_rm": False}
    return values, problems


def _checked(spec: FlagSpec, value: Any) -> Any:
    typed = value_from_yaml(spec, value)
    for number in typed if isinstance(typed, tuple) else (typed,):
        if spec.within is not None and number not in spec.within:
            raise ValueError(f"got {number}, expected a number in {spec.within.text}; {spec.within.fix}")
    return typed


def _shown(content: Any) -> str:
    return f"the keys {', '.join(map(str, content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
