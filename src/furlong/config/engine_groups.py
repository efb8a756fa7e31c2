"""Engine groups of a run: identical engines, a prefill-decode split (`--prefill-num-servers`), or those of a file.

`--sglang-config` has slime's format, with one or several models:

sglang:
  - name: actor
    server_groups:
      - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2}
      - {worker_type: decode, num_gpus: 8, num_gpus_per_engine: 4, overrides: {mem_fraction_static: 0.85}}
  - name: judge
    model_path: /models/judge  # or a name on the Hub
    server_groups:
      - {worker_type: regular, num_gpus: 2}

Exactly one model is trained: the one without a `model_path`, or with that of --hf-checkpoint, unless it has
`update_weights: false`. GPUs are assigned to models and groups in order. `overrides` are SGLang options of this group
only. A `placeholder` leaves its GPUs without an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from furlong.config.checks.value_checks import model_problem
from furlong.config.config_file import read_yaml
from furlong.config.hub import cached_model, hub_name
from furlong.config.passthrough import find, value_in_file
from furlong.config.sections import Config
from furlong.errors import ConfigError

Role = Literal["regular", "prefill", "decode", "placeholder"]

ROLES: tuple[Role, ...] = ("regular", "prefill", "decode", "placeholder")
MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
DEFAULT_NAME = "default"


@dataclass(frozen=True)
class EngineGroup:
    """`num_gpus` // `gpus_per_engine` identical engines. `options` are SGLang's, by field name."""

    role: Role
    num_gpus: int
    gpus_per_engine: int
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def num_engines(self) -> int:
        """Number of engines; 0 for a placeholder."""
        return 0 if self.role == "placeholder" else self.num_gpus // max(self.gpus_per_engine, 1)


@dataclass(frozen=True)
class ServedModel:
    """A model and the engines that serve it. `path` is None for the trained model, which starts as --hf-checkpoint."""

    name: str
    groups: tuple[EngineGroup, ...]
    path: str | None = None

    @property
    def is_trained(self) -> bool:
        """Whether its engines get the trainer's weights."""
        return self.path is None

    @property
    def num_engines(self) -> int:
        """Number of engines of all groups."""
        return sum(group.num_engines for group in self.groups)


@dataclass(frozen=True)
class EnginePart:
    """One engine: its group, its first GPU, counted over all engines, and its number of GPUs."""

    group: EngineGroup
    first_gpu: int
    num_gpus: int


def engine_parts(groups: Sequence[EngineGroup]) -> list[EnginePart]:
    """Return the engines of these groups, in order."""
    parts: list[EnginePart] = []
    first = 0
    for group in groups:
        each = group.gpus_per_engine
        parts += [EnginePart(group, first + i * each, each) for i in range(group.num_engines)]
        first += group.num_gpus
    return parts


def layout_problems(options: Mapping[str, Any], num_gpus: int) -> Iterator[str]:
    """Yield problems of SGLang's `options` for engines of `num_gpus` GPUs; each starts with the name of an option."""
    pp_size, dp_size = int(options.get("pp_size", 1)), int(options.get("dp_size", 1))
    if pp_size < 1 or num_gpus % pp_size:
        yield (
            f"pp-size {pp_size} does not divide the {num_gpus} GPUs of an engine; an engine has tensor-parallel size "
            "x pipeline-parallel size GPUs"
        )
    elif dp_size != 1 and not options.get("enable_dp_attention"):
        yield (
            f"dp-size {dp_size} would create replicas of the model on GPUs that get no weight updates; add "
            "enable-dp-attention, or use more engines with fewer GPUs"
        )
    elif dp_size < 1 or (num_gpus // pp_size) % dp_size:
        yield (
            f"dp-size {dp_size} does not divide the {num_gpus // pp_size} tensor-parallel processes of an engine; "
            "use a divisor"
        )


def is_split(groups: Sequence[EngineGroup]) -> bool:
    """Whether engines are split into prefill and decode."""
    return any(group.role in ("prefill", "decode") for group in groups)


def engine_groups(config: Config) -> list[EngineGroup]:
    """Return the groups of all models, in the order of their GPUs. Raises ConfigError with all problems of the file."""
    return [group for model in served_models(config) for group in model.groups]


def trained_model(config: Config) -> ServedModel:
    """Return the model whose engines generate the rollouts. Raises ConfigError with all problems of the file."""
    return next(model for model in served_models(config) if model.is_trained)


def served_models(config: Config) -> list[ServedModel]:
    """Return the models of a configuration with derived values. Raises ConfigError with all problems of the file."""
    engines = config.engines
    total, each = int(engines.rollout_num_gpus or 0), engines.rollout_num_gpus_per_engine
    if engines.sglang_config is not None:
        return models_in_file(engines.sglang_config, each, config.rollout.hf_checkpoint)
    groups: list[EngineGroup] = []
    if engines.prefill_num_servers is not None:
        prefill = engines.prefill_num_servers * each
        if prefill >= total:
            raise ConfigError(
                f"--prefill-num-servers {engines.prefill_num_servers} of {each} GPUs each leaves none of "
                f"--rollout-num-gpus {total} for decoding; lower it"
            )
        groups = [EngineGroup("prefill", prefill, each), EngineGroup("decode", total - prefill, each)]
    elif total:
        groups = [EngineGroup("regular", total, each)]
    return [ServedModel(DEFAULT_NAME, tuple(groups))]


def models_in_file(path: str, gpus_per_engine: int, hf_checkpoint: str | None) -> list[ServedModel]:
    """Read `--sglang-config`. Raises ConfigError with every problem of the file at once."""
    where = f"--sglang-config {path}"
    form = "`sglang: [{name: ..., server_groups: [...]}]`"
    content = read_yaml(path, where, form=form)
    rows: Any = content.get("sglang") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{where} has another structure; write {form}")
    models: list[ServedModel] = []
    problems: list[str] = []
    for i, row in enumerate(cast(list[dict[str, Any]], rows)):
        name = str(row.get("name", DEFAULT_NAME))
        what = where if len(rows) == 1 else f"{where}, model {name if 'name' in row else i}"
        problems += _model_problems(what, row, hf_checkpoint)
        groups = _groups(what, row, gpus_per_engine, problems)
        model_path = None if _is_trained(row, hf_checkpoint) else cached_model(str(row.get("model_path", "")))
        models.append(ServedModel(name, tuple(groups), model_path))
    names = [model.name for model in models]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(
            f"{where}: two models are named {name!r}, but functions select models by name; give each another name"
        )
    trained = [model.name for model in models if model.is_trained]
    if len(trained) != 1:
        have = f"are trained: {', '.join(trained)}" if trained else "is trained"
        problems.append(
            f"{where}: {len(trained) or 'no model'} {have}; exactly one must have neither `model_path` nor "
            "`update_weights: false`; give the others a `model_path`"
        )
    if problems:
        raise ConfigError(*problems)
    return models


def _is_trained(row: Mapping[str, Any], hf_checkpoint: str | None) -> bool:
    """Return `update_weights`; by default, whether the model is --hf-checkpoint."""
    is_updated = row.get("update_weights")
    return _is_start(row.get("model_path"), hf_checkpoint) if is_updated is None else bool(is_updated)


def _is_start(path: Any, hf_checkpoint: str | None) -> bool:
    """Whether a `model_path` is that of --hf-checkpoint, which may be the local copy of its name on the Hub."""
    return path in (None, hf_checkpoint) or (hf_checkpoint is not None and cached_model(str(path)) == hf_checkpoint)


def _model_problems(where: str, row: Mapping[str, Any], hf_checkpoint: str | None) -> Iterator[str]:
    yield from (f"{where}: unknown key {k!r}; a model has {', '.join(MODEL_KEYS)}" for k in row if k not in MODEL_KEYS)
    if "server_groups" in row and "engine_groups" in row:
        yield f"{where}: `server_groups` and `engine_groups` are the same key; keep one"
    if not isinstance(row.get("update_weights"), bool | None):
        yield f"{where}: update_weights {row['update_weights']!r}, expected true or false"
    path, is_trained = row.get("model_path"), _is_trained(row, hf_checkpoint)
    if is_trained and not _is_start(path, hf_checkpoint):
        yield (
            f"{where}: `update_weights: true` with `model_path` {path}, but the trained model is "
            f"--hf-checkpoint {hf_checkpoint}; remove one of them"
        )
    elif not is_trained and path is None:
        yield f"{where}: `update_weights: false` without a `model_path`; add the directory of the model"
    elif not is_trained and hub_name(str(path), "model"):
        pass  # `resolve_config` reports why there is no copy
    elif not is_trained and (problem := model_problem(f"{where}: model_path", str(path))):
        yield problem


def _groups(where: str, model: Mapping[str, Any], gpus_per_engine: int, problems: list[str]) -> list[EngineGroup]:
    raw: Any = model.get("server_groups", model.get("engine_groups"))
    if not isinstance(raw, list) or not raw:
        problems.append(f"{where}: no `server_groups`; add a list of them")
        return []
    wrong: list[str] = []
    each = model.get("num_gpus_per_engine", gpus_per_engine)
    made = [_group(f"{where}, group {i}", row, each, wrong) for i, row in enumerate(cast(list[Any], raw))]
    groups = [group for group in made if group is not None]
    roles = {group.role for group in groups}
    if is_split(groups) and not roles >= {"prefill", "decode"}:
        wrong.append(
            f"{where}: groups of {' and '.join(sorted(roles))}; prefill and decode need each other; add the missing one"
        )
    if is_split(groups) and "regular" in roles:
        wrong.append(
            f"{where}: `regular` together with prefill and decode, which one router cannot serve; remove one kind"
        )
    if not wrong and not any(group.num_engines for group in groups):
        wrong.append(f"{where}: no group has an engine; add one that is not a placeholder")
    problems += wrong
    return groups


def _group(where: str, row: Any, gpus_per_engine: Any, problems: list[str]) -> EngineGroup | None:
    if not isinstance(row, dict):
        problems.append(f"{where}: {row!r}, expected worker_type and num_gpus")
        return None
    values, num_before = cast(dict[str, Any], row), len(problems)
    unknown = [key for key in values if key not in GROUP_KEYS]
    problems += [f"{where}: unknown key {key!r}; a group has {', '.join(GROUP_KEYS)}" for key in unknown]
    role, total = values.get("worker_type"), values.get("num_gpus")
    each = values.get("num_gpus_per_engine", gpus_per_engine)
    if role not in ROLES:
        what = "an encoder split is not supported yet" if role == "encoder" else f"expected one of {', '.join(ROLES)}"
        problems.append(f"{where}: worker_type {role!r}; {what}")
    for name, number in (("num_gpus", total), ("num_gpus_per_engine", each)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            problems.append(f"{where}: {name} {number!r}, expected a positive number")
    options: dict[str, Any] = {}
    overrides = values.get("overrides") or {}
    if not isinstance(overrides, dict):
        problems.append(f"{where}: overrides {overrides!r}, expected `option: value` lines")
        return None
    for key, value in cast(dict[str, Any], overrides).items():  # checked like --sglang-NAME
        try:
            option = find(f"--sglang-{str(key).replace('_', '-')}")
            options[option.name.replace("-", "_")] = value_in_file(option, value)
        except ValueError as error:
            problems.append(f"{where}: override {key} {error}")
    if len(problems) > num_before:
        return None
    group = EngineGroup(cast(Role, role), cast(int, total), each, options)
    if group.role != "placeholder" and group.num_gpus % each:
        problems.append(f"{where}: num_gpus {total} is not a multiple of num_gpus_per_engine {each}")
    return group
