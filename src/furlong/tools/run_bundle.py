"""Bundles: one training step of a run in a small file for bug reports, reproducible without engine, data or run folder.

A bundle is a zip file:

    bundle.json             format, step, versions, training flags, the model's dimensions, recorded metrics
    rollout.safetensors     the samples as tokens, masks, rewards and log-probs (`tracking.rollout_dump`)
    checkpoint/...          with `with_checkpoint`: the trainer's files of the checkpoint before the step

Private data is excluded: paths, addresses, keys, names, and all text (prompts, responses, labels, metadata) unless
`with_text`. Tokens are included and can be decoded with the tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from furlong.config.command_line import argv_from_config, config_from_values
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.core.model_config import read_json
from furlong.core.sample import Group, Sample, scalar_reward
from furlong.errors import ConfigError, DataError
from furlong.files.atomic import atomic_file
from furlong.files.checkpoint_folder import STATE_FORMAT, TRACKER, folder_name
from furlong.files.manifest import MANIFEST, write_manifest
from furlong.files.sample_file import load_samples, save_samples
from furlong.tracking.run_files import METRICS, read_flags, read_rows
from furlong.version import __version__

FORMAT = "furlong-bundle-1"
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)
MANIFEST_NAME, SAMPLES_NAME, CHECKPOINT_PREFIX = "bundle.json", "rollout.safetensors", "checkpoint/"
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
SECTIONS = frozenset({"algo", "train", "optim"})
MORE_FIELDS = frozenset(
    {
        "rollout_batch_size",
        "n_samples_per_prompt",
        "rollout_temperature",
        "rollout_max_response_len",
        "check_for_nan_in_loss_and_grad",
    }
)
PATTERNS = frozenset({"only_train_params_name_list", "freeze_params_name_list"})  # strings without paths
TEXTS = ("prompt", "response", "label", "metadata", "train_metadata", "tools", "apply_chat_template_kwargs")
HIDDEN = "(left out)"


@dataclass(frozen=True)
class Bundle:
    """The content of `bundle.json`. `flags`: field -> value; `left_out`: flags that were set but are excluded."""

    step: int
    flags: dict[str, Any]
    left_out: list[str]
    metrics: dict[str, float | None]
    model: dict[str, Any]
    versions: dict[str, str]
    has_text: bool
    has_checkpoint: bool

    def words(self) -> list[str]:
        """Return the flags as a command line. Raises ConfigError for flags that this version lacks."""
        specs = flag_specs(Config)
        if unknown := sorted(self.flags.keys() - specs.keys()):
            raise ConfigError(
                f"the bundle of furlong {self.versions.get('furlong')} has flags {unknown}, which {__version__} "
                "lacks; use the version that wrote it"
            )
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in self.flags.items()}
        return argv_from_config(config_from_values(values))


def write_bundle(run: Path, step: int, path: Path, *, with_text: bool = False, with_checkpoint: bool = False) -> Bundle:
    """Write the bundle of a run's step (numbered as in `metrics.jsonl`) to `path`.

    Raises ConfigError if the step was not recorded, or its samples or checkpoint are missing.
    """
    flags = read_flags(run)
    recorded = {row["step"]: row for row in read_rows(run / METRICS, "step")} if (run / METRICS).exists() else {}
    if step not in recorded:
        steps = f"steps {min(recorded)} to {max(recorded)}" if recorded else "no steps"
        raise ConfigError(f"--step {step}: {run / METRICS} has {steps}; the first step is 1")
    groups = _groups(run, step, flags)
    files = _checkpoint_files(flags, step) if with_checkpoint else {}
    kept, left_out = _split_flags(flags)
    bundle = Bundle(
        step=step,
        flags=kept,
        left_out=left_out,
        metrics={k: v for k, v in recorded[step].items() if k.startswith(("train/", "rollout/"))},
        model=_shape(Path(str(flags.get("hf_checkpoint")))),
        versions=versions(),
        has_text=with_text,
        has_checkpoint=with_checkpoint,
    )
    for group in groups:
        for sample in group.samples:
            _scrub(sample, flags.get("reward_key"), with_text=with_text)
    samples = path.with_name(f"{path.name}.samples")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_samples(samples, step - 1, groups)
        with atomic_file(path) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
            text = json.dumps({"format": FORMAT, **dataclasses.asdict(bundle)}, indent=1)
            file.writestr(zipfile.ZipInfo(MANIFEST_NAME), text, zipfile.ZIP_DEFLATED)
            file.write(samples, SAMPLES_NAME)
            for name, source in files.items():
                file.write(source, CHECKPOINT_PREFIX + name)
    finally:
        samples.unlink(missing_ok=True)
    return bundle


def read_bundle(path: Path) -> Bundle:
    """Read `bundle.json`. Raises DataError if the file is not a bundle."""
    if not path.is_file():  # zipfile would seek to the end of a device
        raise DataError(f"{path}: no such file; create a bundle with `furlong bundle`")
    try:
        with zipfile.ZipFile(path) as file:
            values = json.loads(file.read(MANIFEST_NAME))
        if values.pop("format", None) != FORMAT:
            raise DataError(
                f"{path} is not in a format that this version supports ({FORMAT}); use the version that wrote it"
            )
        return Bundle(**values)
    except DAMAGED as error:
        raise DataError(
            f"{path} is not a bundle, or is damaged ({type(error).__name__}: {error}); create one with `furlong bundle`"
        ) from error


def unpack(path: Path, bundle: Bundle, folder: Path) -> list[str]:
    """Extract a bundle's files into `folder`; return the flags for them and for the step."""
    step = bundle.step - 1
    words = ["--load-debug-rollout-data", str(folder / "{rollout_id}.safetensors")]
    words += ["--num-rollout", str(bundle.step), "--start-rollout-id", str(step)]
    try:
        with zipfile.ZipFile(path) as file:
            (folder / f"{step}.safetensors").write_bytes(file.read(SAMPLES_NAME))
            if bundle.has_checkpoint:
                checkpoint = folder / "checkpoint" / folder_name(step)
                (checkpoint / "trainer").mkdir(parents=True)
                for name in file.namelist():
                    if name.startswith(CHECKPOINT_PREFIX):  # without folders, which could lead outside
                        (checkpoint / "trainer" / Path(name).name).write_bytes(file.read(name))
                mark = {"id": "bundle", "events": 0, "bytes": 0}  # of no data and no ledger
                state = {"format": STATE_FORMAT, "step": step, "ahead": [], "source": {}, "ledger": mark}
                (checkpoint / "state.json").write_text(json.dumps(state))
                write_manifest(checkpoint, step)
                (checkpoint.parent / TRACKER).write_text(f"{step}\n")
                words += ["--load", str(checkpoint.parent)]
    except DAMAGED as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); copy it again") from error
    return words


def shape_differences(bundle: Bundle, model: Path) -> dict[str, tuple[Any, Any]]:
    """Return the entries of config.json in which the bundle's model and `model` differ."""
    local = _shape(model)
    names = dict.fromkeys([*bundle.model, *local])
    return {n: (bundle.model.get(n), local.get(n)) for n in names if bundle.model.get(n) != local.get(n)}


def versions() -> dict[str, str]:
    """Return the versions that affect a step's numbers."""
    base = {"furlong": __version__, "python": platform.python_version(), "machine": platform.machine()}
    return base | {name: metadata.version(name) for name in PACKAGES}


def _groups(run: Path, step: int, flags: Mapping[str, Any]) -> list[Group]:
    template = flags.get("save_debug_rollout_data") or flags.get("load_debug_rollout_data")
    if template is None:
        raise ConfigError(
            f"{run} has no saved samples; a bundle needs a run with --save-debug-rollout-data PATH_{{rollout_id}} or "
            "--dump-details DIR"
        )
    path = Path(template.replace("{rollout_id}", str(step - 1)))
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; {run} saved the samples of step {step} there: restore the file")
    return load_samples(path, step - 1).groups


def _checkpoint_files(flags: Mapping[str, Any], step: int) -> dict[str, Path]:
    save = flags.get("save")
    folder = None if save is None else Path(save) / folder_name(step - 1)
    if folder is None or not (folder / MANIFEST).is_file():
        problem = "the run has no --save" if folder is None else f"{folder} does not exist"
        raise ConfigError(f"--with-checkpoint: {problem}; step {step} needs the checkpoint of step {step - 1}")
    return {path.name: path for path in sorted((folder / "trainer").iterdir()) if path.is_file()}


def _split_flags(flags: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    for spec in flag_specs(Config).values():
        value = flags.get(spec.field)
        if spec.section not in SECTIONS and spec.field not in MORE_FIELDS:
            continue
        # Numbers, switches and choices, and patterns of parameters.
        if spec.field in PATTERNS or (spec.type is not str and spec.kind != "json") or spec.choices:
            kept[spec.field] = value
        elif value not in (None, [], spec.default):
            left_out.append(spec.flag)
    return kept, left_out


def _shape(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json; use the model's folder with --hf-checkpoint")
    config = read_json(path)
    kinds = (int, float, bool)
    values = {k: v for k, v in config.items() if isinstance(v, kinds) and not k.startswith("_")}
    return {"model_type": config.get("model_type")} | values


def _scrub(sample: Sample, reward_key: str | None, *, with_text: bool) -> None:
    if isinstance(sample.reward, dict):
        sample.reward = scalar_reward(sample, reward_key)
    if sample.outcome is not None:
        reward = None if sample.outcome.reward is None else sample.reward
        reason = HIDDEN if sample.outcome.reason else ""
        sample.outcome = dataclasses.replace(sample.outcome, reward=reward, reason=reason)
    sample.generate_function_path = sample.custom_rm_path = sample.session_id = None
    if not with_text:
        empty = Sample()
        for name in TEXTS:
            setattr(sample, name, getattr(empty, name))
