"""Names on the Hugging Face Hub where folders and files are: each is resolved once, at the start, to a local copy.

    Qwen/Qwen3-0.6B                    a model; Qwen/Qwen3-0.6B@REVISION is a branch, tag or commit of it
    openai/gsm8k:train?config=main     a split of a data set; openai/gsm8k@REVISION:train?config=main

A local path takes precedence, and a copy in the cache over the Hub. huggingface_hub and datasets do the work, so their
variables apply: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE. Only weights in safetensors and files of data are
downloaded, no pickle and no code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus, unquote_plus

from furlong.catalogue import Problem
from furlong.config.checks.value_checks import DATA_FORMATS, split_slice
from furlong.config.config_file import read_yaml
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.config.task_specs import is_task, query_values
from furlong.core.process_environment import log_stream
from furlong.errors import CheckpointError, ConfigError
from furlong.files.checkpoint_folder import find_checkpoint, read_state

_NAME = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?"
    r"(?::(?P<split>[\w.-]+))?(?:\?(?P<query>.*))?"
)
_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # configuration and tokenizer
_WEIGHTS = "*.safetensors"
_NEVER = ("*/*", "consolidated*")  # other formats of the same weights
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_BUILDERS = ("parquet", "json", "csv", "arrow", "text")  # readers of datasets that decode no pickle and no media
_FORM = "write OWNER/NAME:SPLIT or OWNER/NAME:SPLIT?config=NAME"
_PROMPT_DATA = re.compile(r"[?&]prompt_data=([^&]*)")  # in a value of --environment

REPORT_S = 30.0  # between two lines about a download

Commits = Mapping[str, str]  # by `HubName.key`


@dataclass(frozen=True)
class HubName:
    """A name on the Hub. kind: "model" or "dataset". split, config: of a data set, "" if not given."""

    kind: str
    id: str
    revision: str = "main"
    split: str = ""
    config: str = ""

    @property
    def key(self) -> str:
        """The repository and revision, by which a run records the commit."""
        return f"{self.kind} {self.id}@{self.revision}"

    @property
    def text(self) -> str:
        """The name as a value of a flag."""
        split, config = self.split and f":{self.split}", self.config and f"?config={self.config}"
        return f"{self.id}@{self.revision}{split}{config}"


def hub_name(text: str, kind: str) -> HubName | None:
    """Return the name that `text` has on the Hub; None for a local path. A slice `@[a:b]` is left out.

    What has neither a split nor a revision is a path if its first part is a folder. Raises ConfigError.
    """
    text = split_slice(text)[0]
    match = _NAME.fullmatch(text)
    if match is None or os.path.exists(text) or is_task(text):
        return None
    if kind == "model" and (match["split"] or match["query"] is not None):
        return None
    name = match["id"].rpartition("/")[2]
    if kind == "dataset" and Path(name).suffix in (*DATA_FORMATS, ".json", ".csv", ".txt", ".arrow", ".py"):
        return None
    is_explicit = match["revision"] or match["split"] or match["query"] is not None
    if not is_explicit and Path(text).parent.exists():
        return None
    values = query_values("the part after ?", match["query"] or "", _FORM)
    if unknown := values.keys() - {"config"}:
        raise ConfigError(f"a data set on the Hub has no option {', '.join(sorted(unknown))}; {_FORM}")
    revision = match["revision"] or "main"
    return HubName(kind, match["id"], revision, match["split"] or "", values.get("config", ""))


def resolve_model(flag: str, text: str, *, weights: bool = True) -> str:
    """Return the folder of a model, downloaded if `text` is a name on the Hub; any other text is returned unchanged.

    weights: whether they are needed, or only configuration and tokenizer. Raises ConfigError that starts with `flag`.
    """
    with _named(f"{flag} {text}"):
        name = hub_name(text, "model")
        return text if name is None else str(_model_folder(name, name.revision, weights))


def resolve_data(flag: str, text: str, commits: Commits | None = None) -> str:
    """Return the folder of a split of a data set as datasets' `save_to_disk` writes it, with the slice of `text`.

    Any other text is returned unchanged. commits: of revisions, as a run recorded them. Raises ConfigError.
    """
    with _named(f"{flag} {text}"):
        name = hub_name(text, "dataset")
        if name is None:
            return text
        folder = _data_folder(name, (commits or {}).get(name.key, name.revision))
        return str(folder) + text.removeprefix(split_slice(text)[0])


@dataclass
class LocalCopies:
    """Values by field with local copies in place of names. commits: by key. names: with the commit, by local path."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    commits: dict[str, str] = field(default_factory=dict[str, str])
    names: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])


def resolve_config(config: Config, *, weights: bool = True) -> LocalCopies:
    """Resolve all flags that are names on the Hub. A run that resumes uses the commits that its checkpoint records."""
    copies = LocalCopies()
    recorded: Commits | None = None

    def local_copy(key: str, flag: str, text: str, kind: str) -> str | None:
        nonlocal recorded
        try:
            with _named(f"{flag} {text}"):
                if (name := hub_name(text, kind)) is None:
                    return None
                recorded = recorded_commits(config) if recorded is None else recorded
                revision = recorded.get(name.key, name.revision)
                is_model = kind == "model"
                folder = _model_folder(name, revision, weights) if is_model else _data_folder(name, revision)
        except ConfigError as error:
            copies.problems += [Problem(problem, _ROWS.get(key, "")) for problem in error.problems]
            return None
        commit = copies.commits[name.key] = folder.name if is_model else folder.parent.name
        copies.names[str(folder)] = replace(name, revision=commit).text
        return str(folder) + text.removeprefix(split_slice(text)[0])

    for key, spec in flag_specs(Config).items():
        value = spec.value_in(config)
        if not spec.hub or not value or (key == "load" and value == config.checkpoint.save):
            continue
        words = [str(word) for word in (value if isinstance(value, tuple) else (value,))]
        resolved = list(words)
        for place, word in enumerate(words):
            head, text, tail = "", word, ""
            if key == "eval_prompt_data" and len(words) > 1 and place % 2 == 0:  # the name of a set
                continue
            if key == "environment":
                if (part := _PROMPT_DATA.search(word)) is None:
                    continue
                head, text, tail = word[: part.start(1)], unquote_plus(part[1]), word[part.end() :]
            if (path := local_copy(key, spec.flag, text, spec.hub)) is not None:
                resolved[place] = head + (quote_plus(path, safe="/") if key == "environment" else path) + tail
        if resolved != words:
            copies.values[key] = tuple(resolved) if isinstance(value, tuple) else resolved[0]
    for path in _served_models(config.engines.sglang_config):
        local_copy("sglang_config", "--sglang-config: model_path", path, "model")
    return copies


def _served_models(path: str | None) -> list[str]:
    """Return each `model_path` in the file of --sglang-config; none if the file is wrong, which `validate` reports."""
    content: Any = None
    if path is not None:
        with contextlib.suppress(ConfigError):
            content = read_yaml(path, "--sglang-config", form="")
    rows: Any = content.get("sglang") if isinstance(content, dict) else None
    models = [row.get("model_path") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [model for model in models if isinstance(model, str)]


def cached_model(text: str) -> str:
    """Return the folder of a model on the Hub that is in the cache; any other text is returned unchanged."""
    name = hub_name(text, "model")
    folder = None if name is None else _cached_folder(name, name.revision, weights=False)
    return text if folder is None else str(folder)


_CHECKPOINTS = ("load", "ref_load", "opd_teacher_load")
_ROWS = {"hf_checkpoint": "CKPT07"} | dict.fromkeys(_CHECKPOINTS, "CKPT01")  # of the diagnoses


def recorded_commits(config: Config) -> Commits:
    """Return the commits by key that the checkpoint in --load has recorded; none if it only provides weights."""
    flags = config.checkpoint
    if flags.load is None or flags.finetune or not Path(flags.load).is_dir():
        return {}
    with contextlib.suppress(CheckpointError):  # which the preflight reports
        checkpoint = find_checkpoint(Path(flags.load), step=flags.ckpt_step, save_dir=None)
        if checkpoint is not None:
            return read_state(checkpoint).get("hub", {})
    return {}


@contextlib.contextmanager
def _named(what: str) -> Generator[None]:
    """Turn errors of the libraries into a ConfigError that starts with `what` and has a fix."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(p if p.startswith("--") else f"{what}: {p}" for p in error.problems)) from error.__cause__
    except Exception as error:
        if "huggingface_hub" not in sys.modules:
            raise
        raise ConfigError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"access is restricted; accept its conditions on {endpoint}, and set HF_TOKEN or run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the Hub has no such revision; check the part after @"
    if isinstance(error, errors.RepositoryNotFoundError) or type(error).__name__ == "DatasetNotFoundError":
        private = "or set HF_TOKEN or run `hf auth login` for a private one"
        return f"neither a local path nor public on {endpoint}; check the name, {private}"
    text = " ".join(str(error).split())[:300]
    where = f"cannot be read from {endpoint} ({type(error).__name__}: {text})"
    return f"{where}; check the name, HF_ENDPOINT and HF_TOKEN"


def _not_cached(name: HubName, error: Exception | None) -> ConfigError:
    from huggingface_hub import constants

    is_offline, fix = bool(constants.HF_HUB_OFFLINE), "start the command"
    if name.kind == "model":
        fix = f"run `hf download {name.id}{'' if name.revision == 'main' else f' --revision {name.revision}'}`"
    wrong = ConfigError(
        f"no such local path, {'HF_HUB_OFFLINE is set' if is_offline else f'{constants.ENDPOINT} cannot be reached'}, "
        f"and the cache {constants.HF_HOME} has no complete copy; "
        f"{'unset HF_HUB_OFFLINE' if is_offline else 'check the network and HF_ENDPOINT'}, or {fix} where there is a "
        "network and use that HF_HOME here"
    )
    wrong.__cause__ = error
    return wrong


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether an error, or one that it follows from, is about the network and not about what was asked for."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return True
    while error is not None:
        # by name: the exceptions of httpx, which huggingface_hub may have as another package
        is_network = type(error).__name__ in ("ConnectError", "ConnectTimeout", "ReadTimeout")
        if is_network or isinstance(error, ConnectionError | TimeoutError | LocalEntryNotFoundError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _snapshot(name: HubName, revision: str, *, weights: bool, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": [*_FILES, *([_WEIGHTS] if weights else [])],
        "ignore_patterns": [*_NEVER],
        "local_files_only": local_files_only,
    }
    return Path(snapshot_download(name.id, **options))


def _cached_folder(name: HubName, revision: str, *, weights: bool) -> Path | None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError):
        folder = _snapshot(name, revision, weights=weights, local_files_only=True)
        if _is_complete(folder, weights):
            return folder
    return None


def _model_folder(name: HubName, revision: str, weights: bool) -> Path:
    if (cached := _cached_folder(name, revision, weights=weights)) is not None:
        return cached
    try:
        with _reported(f"downloading {name.id} ({revision}) from the Hub"):
            folder = _snapshot(name, revision, weights=weights)
    except Exception as error:
        if _is_unreachable(error):
            raise _not_cached(name, error) from error
        raise
    if not (folder / "config.json").is_file():
        raise ConfigError("it has no config.json, so it is not a model of transformers; choose another one")
    if weights and not any(folder.glob(_WEIGHTS)):
        raise ConfigError("it has no weights in safetensors, the only format that is downloaded; choose a conversion")
    return folder


def _is_complete(folder: Path, weights: bool) -> bool:
    if not (folder / "config.json").is_file() or not any(folder.glob("tokenizer*")):
        return False
    if not weights:
        return True
    if not (folder / _INDEX).is_file():
        return (folder / _SINGLE).is_file()
    shards: dict[str, str] = json.loads((folder / _INDEX).read_bytes())["weight_map"]
    return all((folder / shard).is_file() for shard in shards.values())


def _data_folder(name: HubName, revision: str) -> Path:
    """Return the folder of a split: HF_HOME/furlong/OWNER/NAME/CONFIG/COMMIT/NAME-SPLIT."""
    from huggingface_hub import constants

    root = Path(constants.HF_HOME) / "furlong" / name.id / (name.config or "default")
    known = root / "refs" / f"{revision}:{name.split}".replace("/", "--")
    if known.is_file() and (folder := root / known.read_text()).is_dir():
        return folder
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError("needs the package datasets, which is not installed; pip install datasets") from error
    try:
        with _reported(f"reading the data set {name.id} ({revision}) from the Hub"):
            builder: Any = datasets.load_dataset_builder(name.id, name.config or None, revision=revision)
            kind = type(builder).__module__.rpartition(".")[2]
            if kind not in (*_BUILDERS, "cache"):
                raise ConfigError(f"its files are of the kind {kind}; choose one of {', '.join(_BUILDERS)}")
            builder.download_and_prepare()
    except ConfigError:
        raise
    except Exception as error:
        if _is_unreachable(error):
            raise _not_cached(name, error) from error
        if isinstance(error, ValueError) and "onfig" in str(error):  # a config is missing, or has another name
            names: list[str] = datasets.get_dataset_config_names(name.id, revision=revision)
            if name.config not in names:
                raise ConfigError(f"the data set has the configs {', '.join(names)}; add ?config={names[0]}") from error
        raise
    splits = list(builder.info.splits or {})
    split = name.split or (splits[0] if len(splits) == 1 else "")
    if split not in splits:
        wrong = f"it has no split {split}" if split else "it has several splits"
        raise ConfigError(f"{wrong}; write {name.id}:SPLIT with one of {', '.join(splits)}")
    folder = root / str(builder.hash) / f"{name.id.rpartition('/')[2]}-{split}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            builder.as_dataset(split=split).save_to_disk(Path(partial) / "data")
            with contextlib.suppress(FileExistsError):  # of another process
                (Path(partial) / "data").rename(folder)
    known.parent.mkdir(exist_ok=True)
    known.write_text(str(folder.relative_to(root)))
    return folder


@contextlib.contextmanager
def _reported(what: str) -> Generator[None]:
    """Print what is done, and, where the libraries show no progress bar, how long it takes. Nothing if offline."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield
        return
    stream, started, is_done = log_stream(), time.monotonic(), threading.Event()
    stream.write(f"furlong: {what}\n")

    def report() -> None:
        while not is_done.wait(REPORT_S):
            stream.write(f"furlong: {what}: {time.monotonic() - started:.0f} s so far\n")

    thread = threading.Thread(target=report, name="furlong-hub", daemon=True)
    if not stream.isatty():
        thread.start()
    try:
        yield
    finally:
        is_done.set()
        if thread.ident is not None:
            thread.join()
