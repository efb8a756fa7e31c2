"""Evaluation sets from `--eval-prompt-data NAME FILE ...` or `--eval-config`; values default to those of training.

eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
  datasets:
    - {name: aime, path: aime.jsonl, rm_type: math, max_response_len: 8192}
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from furlong.config.checks.value_checks import prompt_file_problem, set_name_problem, verifier_problem
from furlong.config.config_file import read_yaml
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.flag_values import value_from_yaml
from furlong.config.sections import Config
from furlong.core.text import did_you_mean, shortened
from furlong.errors import ConfigError


@dataclass(frozen=True)
class EvalSpec:
    """One evaluation set with all values resolved, named like the eval flags without their prefix."""

    name: str
    path: str
    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    rm_type: str | None
    custom_rm_path: str | None
    custom_generate_function_path: str | None
    reward_key: str | None
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    min_new_tokens: int
    max_response_len: int | None
    max_prompt_len: int | None
    max_context_len: int | None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    metadata_overrides: dict[str, Any] = field(default_factory=dict[str, Any])


_FIELDS = tuple(f.name for f in dataclasses.fields(EvalSpec))


def eval_specs(config: Config) -> list[EvalSpec]:
    """Return the evaluation sets of a resolved config. Raises ConfigError with every problem of the file at once."""
    defaults = _defaults(config)
    if config.eval.eval_config is not None:
        return _from_file(Path(config.eval.eval_config), defaults)
    pairs = config.eval.named_files()
    if len(pairs) % 2:
        raise ConfigError(f"--eval-prompt-data takes pairs NAME FILE, got {len(pairs)} values: {' '.join(pairs)}")
    return [EvalSpec(name=name, path=path, **defaults) for name, path in zip(pairs[::2], pairs[1::2], strict=True)]


def used_eval_specs(config: Config) -> list[EvalSpec]:
    """Return the sets that a run evaluates: none without --eval-interval. Raises ConfigError as `eval_specs`."""
    return eval_specs(config) if config.eval.is_used else []


def _defaults(config: Config) -> dict[str, Any]:
    """Return the values of the flags for all sets; where they are unset, those of training."""
    flags = vars(config.data) | vars(config.rollout) | vars(config.reward) | vars(config.eval)
    defaults: dict[str, Any] = {}
    for key in _FIELDS:
        values = [flags[name] for name in _flag_names(key) if name in flags]
        if values:
            defaults[key] = next((value for value in values if value is not None), None)  # 0 is a value (greedy)
    return defaults | {"stop": defaults["stop"] or (), "stop_token_ids": defaults["stop_token_ids"] or ()}


def _flag_names(key: str) -> tuple[str, ...]:
    """Return the fields that set `key` for all sets or for training, by precedence."""
    return f"eval_{key}", f"rollout_{key}", key


def _from_file(path: Path, defaults: dict[str, Any]) -> list[EvalSpec]:
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
    for i, row in enumerate(section["datasets"], start=1):
        where = f"--eval-config {path}: dataset {i}"
        if not isinstance(row, dict):
            problems.append(f"{where} is {shortened(row)}, expected keys and values, at least `name` and `path`")
            continue
        where += f" ({row['name']})" if row.get("name") else ""
        values, wrong = _values(where, {**shared, **row})
        problems += wrong
        if not wrong:
            specs.append(EvalSpec(**(defaults | values)))
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
    """Return the evaluation section of the file. Raises ConfigError if it is malformed."""
    form = "`eval: {defaults: ..., datasets: [{name: ..., path: ...}]}`"
    content = read_yaml(path, f"--eval-config {path}", form=form)
    section = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(section, dict) or not isinstance(section.get("datasets"), list):
        raise ConfigError(f"--eval-config {path} contains {_shown(content)}; write {form}")
    if not section["datasets"]:
        raise ConfigError(f"--eval-config {path}: `datasets` is empty; add a set, or remove --eval-config")
    return section


def _values(where: str, row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a set, converted to the types of the corresponding flags, and the problems.

    A key without a value defaults to training.
    """
    values: dict[str, Any] = {}
    specs = flag_specs(Config)
    problems = [f"{where} has no `{key}`; add it" for key in ("name", "path") if not row.get(key)]
    for key, value in row.items():
        if key not in _FIELDS:
            _, hint = did_you_mean(str(key), _FIELDS)
            problems.append(f"{where} has an unknown key {key!r}; {hint or 'known keys are ' + ', '.join(_FIELDS)}")
        elif value is None:
            continue
        elif key == "metadata_overrides":
            values[key] = value
            if not isinstance(value, dict):
                problems.append(f"{where}, {key}: got {shortened(value)}, expected keys and values")
        elif key in ("name", "path"):
            values[key] = str(value)
            if key == "name" and (problem := set_name_problem(f"{where}, name", str(value))):
                problems.append(problem)
        else:
            try:
                spec = next(specs[name] for name in _flag_names(key) if name in specs)
                values[key] = _checked(spec, value)
            except ValueError as error:
                problems.append(f"{where}, {key}: {error}")
    if (path := values.get("path")) and (problem := prompt_file_problem(f"{where}, path", path)):
        problems.append(problem)
    if (name := values.get("rm_type")) and (problem := verifier_problem(f"{where}, rm_type", name)):
        problems.append(problem)
    return values, problems


def _checked(spec: FlagSpec, value: Any) -> Any:
    """Convert a value to the flag's type. Raises ValueError for a wrong type or a number outside of its range."""
    typed = value_from_yaml(spec, value)
    for number in typed if isinstance(typed, tuple) else (typed,):
        if spec.within is not None and number not in spec.within:
            raise ValueError(f"got {number}, expected a number in {spec.within.text}; {spec.within.fix}")
    return typed


def _shown(content: Any) -> str:
    """Return a short description of a file's content."""
    return f"the keys {', '.join(map(str, content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
