"""An index of the samples that a run has dumped, so that 100,000 of them can be filtered and paged.

The index is an SQLite file in the user's cache folder. A thread adds new and changed dumps, the newest first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.core.sample import Sample
from furlong.errors import DataError
from furlong.files.sample_file import load_samples
from furlong.tracking.rollout_dump import EVALUATION, SAMPLES
from furlong.view.turns import last_user_text, prompt_text, text_of

logger = logging.getLogger(__name__)

ROLLOUT_ID = "{rollout_id}"
PAGE = 50
FORMAT = 3  # of the index; another one is built again
MESSAGES = "messages"  # metadata of samples of agents: the conversation
STORED_CHARS = 2000  # of a prompt or response, for the search and the list
LISTED_CHARS = 160
COLUMNS = (
    "file", "pos", "step", "rollout", "is_eval", "name", "grp", "idx", "reward", "status", "prompt_len",
    "response_len", "mean_logp",
)  # fmt: skip
TEXTS = (
    "prompt",
    "response",
    "label",
    "asked",
)  # in a separate table, so that filters and orders read short rows only
SCHEMA = f"""
create table if not exists files (id integer primary key, path text unique, stamp text, problem text);
create table if not exists samples ({", ".join(COLUMNS)}, primary key (file, pos)) without rowid;
create index if not exists by_step on samples (is_eval, step desc, grp, pos);
create table if not exists texts (file, pos, {", ".join(TEXTS)}, primary key (file, pos)) without rowid;
"""


@dataclass(frozen=True)
class SampleFile:
    """One dump: of the rollout that step `rollout_id` + 1 trains on, or of the evaluation after `rollout_id` steps."""

    path: Path
    rollout_id: int
    is_eval: bool

    @property
    def step(self) -> int:
        """The step, as in metrics.jsonl."""
        return self.rollout_id if self.is_eval else self.rollout_id + 1


def sample_files(folder: Path, flags: Mapping[str, Any]) -> list[SampleFile]:
    """Return the dumps of a run, the newest first."""
    path = dump_path(folder, flags)
    if path is None:
        return []
    before, _, after = path.name.partition(ROLLOUT_ID)
    pattern = re.compile(rf"{re.escape(before)}({EVALUATION})?(\d+){re.escape(after)}")
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    files = [SampleFile(parent / match[0], int(match[2]), match[1] is not None) for match in matches]
    return sorted(files, key=lambda file: (-file.step, file.is_eval))


def dump_path(folder: Path, flags: Mapping[str, Any]) -> Path | None:
    """Return the path of the dumps, with `{rollout_id}`; None if the run saves none."""
    if template := flags.get("save_debug_rollout_data"):
        return _located(folder, flags, template)
    return folder / SAMPLES if flags.get("keep_samples") else None


def not_kept(name: str, flags: Mapping[str, Any]) -> str | None:
    """Return why a run that keeps only its newest samples has no dump of this name; None for other runs and names."""
    match = re.fullmatch(rf"({EVALUATION})?(\d+)\.safetensors", name)
    if match is None or flags.get("save_debug_rollout_data") or not flags.get("keep_samples"):
        return None
    step = SampleFile(Path(name), int(match[2]), match[1] is not None).step
    kind = "the evaluation of step" if match[1] else "step"
    return f"the samples of {kind} {step} are not kept (--keep-samples {flags['keep_samples']}); choose another step"


def batch_file(folder: Path, flags: Mapping[str, Any], rollout_id: int) -> Path | None:
    """Return the training batch of a rollout (--save-debug-train-data), None if it was not saved."""
    template = flags.get("save_debug_train_data")
    if not template:
        return None
    name = _located(folder, flags, template)
    path = Path(str(name).replace(ROLLOUT_ID, str(rollout_id)).replace("{rank}", "0"))
    return path if path.is_file() else None


def _located(folder: Path, flags: Mapping[str, Any], template: str) -> Path:
    """Return the path of a template: below the run's folder if it was below --output-dir."""
    output_dir = str(flags.get("output_dir") or "")
    if output_dir and Path(template).is_relative_to(output_dir):
        return folder / Path(template).relative_to(output_dir)
    return start_folder(folder, flags) / template


def start_folder(folder: Path, flags: Mapping[str, Any]) -> Path:
    """Return the folder that the run's relative paths are relative to: what is above --output-dir, else the current."""
    below = Path(str(flags.get("output_dir") or "")).parts
    above = folder.resolve()
    return Path(*above.parts[: -len(below)]) if below and above.parts[-len(below) :] == below else Path()


class SampleIndex:
    """The samples of one run. Thread-safe: every call opens the file for itself.

    reward_key: the entry of object rewards that counts.
    """

    def __init__(self, folder: Path, flags: Mapping[str, Any]) -> None:
        self._folder, self._flags = folder, flags
        self._reward_key: str | None = flags.get("reward_key")
        digest = hashlib.sha256(f"{FORMAT}:{folder.resolve()}".encode()).hexdigest()[:24]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "furlong" / "view"
        cache.mkdir(parents=True, exist_ok=True)
        self._path = cache / f"{digest}.sqlite"
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._listed: tuple[int, dict[str, SampleFile]] = (-1, {})
        self._indexed = -1  # time of the folder's last change when all of its files were indexed
        with closing(self._open()) as db:
            db.executescript(SCHEMA)

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=30.0)
        db.execute("pragma journal_mode=wal")
        db.execute("pragma synchronous=off")
        db.row_factory = sqlite3.Row
        return db

    def _files(self) -> tuple[int, dict[str, SampleFile]]:
        """Return the time of the folder's last change and its dumps by name, listed again if it has changed."""
        path = dump_path(self._folder, self._flags)
        changed = path.parent.stat().st_mtime_ns if path is not None and path.parent.is_dir() else 0
        if changed != self._listed[0]:
            self._listed = changed, {file.path.name: file for file in sample_files(self._folder, self._flags)}
        return self._listed

    def update(self) -> int:
        """Index dumps that are new or have changed, and forget deleted ones; returns the number indexed.

        Furlong renames dumps into place, which changes their folder; without a change there is nothing to do.
        """
        changed, named = self._files()
        if changed == self._indexed:
            return 0
        with self._lock, closing(self._open()) as db:
            files = {str(file.path): file for file in named.values()}
            known = {row["path"]: row["stamp"] for row in db.execute("select path, stamp from files")}
            for path in known.keys() - files.keys():
                _forget(db, path)
            db.commit()
            count = 0
            for path, file in files.items():
                stamp = _stamp(file.path)
                if self._ended.is_set() or stamp is None or known.get(path) == stamp:
                    continue
                self._add(db, file, stamp)
                count += 1
            if not self._ended.is_set():
                self._indexed = changed
            return count

    def close(self) -> None:
        """End an update after the current file."""
        self._ended.set()

    def _add(self, db: sqlite3.Connection, file: SampleFile, stamp: str) -> None:
        path, problem = str(file.path), ""
        _forget(db, path)
        try:
            samples = list(self._samples(file))
        except DataError as error:
            samples, problem = [], str(error)
        number = db.execute(
            "insert into files (path, stamp, problem) values (?, ?, ?)", (path, stamp, problem)
        ).lastrowid
        places = [(number, pos) for pos in range(len(samples))]
        rows = [(*place, *values) for place, (values, _) in zip(places, samples, strict=True)]
        texts = [(*place, *values) for place, (_, values) in zip(places, samples, strict=True)]
        db.executemany(f"insert into samples values ({','.join('?' * len(COLUMNS))})", rows)
        db.executemany(f"insert into texts values ({','.join('?' * (2 + len(TEXTS)))})", texts)
        db.commit()

    def _samples(self, file: SampleFile) -> Iterator[tuple[tuple[Any, ...], tuple[str, ...]]]:
        """Yield the values of `COLUMNS` after the place, and the texts, of each sample."""
        dump = load_samples(file.path)
        for group, name in zip(dump.groups, dump.names, strict=True):
            for sample in group.samples:
                asked = last_user_text(sample.metadata.get(MESSAGES) or sample.prompt)
                texts = (prompt_text(sample.prompt), sample.response, text_of(sample.label), asked)
                yield self._row(file, group.index, name, sample), tuple(text[:STORED_CHARS] for text in texts)

    def _row(self, file: SampleFile, group: int, name: str, sample: Sample) -> tuple[Any, ...]:
        pairs = zip(sample.rollout_log_probs or [], mask_of(sample), strict=False)  # user code may set other lengths
        log_probs = [log_prob for log_prob, is_trained in pairs if is_trained]
        return (
            file.step, file.rollout_id, int(file.is_eval), name, group, sample.index,
            reward_number(sample, self._reward_key), sample.status.value, sample.prompt_length,
            sample.response_length, sum(log_probs) / len(log_probs) if log_probs else None,
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Return what the filters offer: steps, statuses, evaluation sets, damaged files, and files not indexed yet."""
        files = self._files()[1]
        with closing(self._open()) as db:
            done = db.execute("select count(*) from files").fetchone()[0]
            steps = db.execute("select distinct step, is_eval from samples order by step").fetchall()
            return {
                "saves_samples": dump_path(self._folder, self._flags) is not None,
                "is_newest": not self._flags.get("save_debug_rollout_data"),
                "generates": self._flags.get("loss_type") != "sft_loss",
                "where": str(dump_path(self._folder, self._flags) or ""),
                "saves_batches": bool(self._flags.get("save_debug_train_data")),
                "num_samples": db.execute("select count(*) from samples").fetchone()[0],
                "num_waiting": max(len(files) - done, 0),
                "steps": [row["step"] for row in steps if not row["is_eval"]],
                "eval_steps": [row["step"] for row in steps if row["is_eval"]],
                "statuses": [row[0] for row in db.execute("select distinct status from samples order by 1")],
                "sets": [row[0] for row in db.execute("select distinct name from samples where is_eval order by 1")],
                "problems": [row[0] for row in db.execute("select problem from files where problem != '' limit 5")],
            }

    def page(self, filters: Mapping[str, Any], *, offset: int = 0, limit: int = PAGE) -> dict[str, Any]:
        """Return {"total": ..., "rows": [...]}, by step (the newest first), group and position."""
        where, values = _where(filters)
        order = ORDERS.get(str(filters.get("order") or ""), ORDERS[""])
        with closing(self._open()) as db:
            total = db.execute(f"select count(*) from samples {where}", values).fetchone()[0]
            query = f"select * from samples {where} order by {order} limit ? offset ?"
            found = [dict(row) for row in db.execute(query, (*values, limit, offset))]
            for row in found:
                place = (row["file"], row["pos"])
                texts = db.execute("select * from texts where file = ? and pos = ?", place).fetchone()
                row |= {name: texts[name][:LISTED_CHARS] for name in TEXTS}
                path = db.execute("select path from files where id = ?", place[:1]).fetchone()[0]
                row["file"] = Path(path).name
        return {"total": total, "rows": found}

    def file_named(self, name: str) -> SampleFile | None:
        """Return the dump with this file name, None if the run has none."""
        return self._files()[1].get(name)


ORDERS = {
    "": "step desc, grp, pos",
    "reward": "reward, step desc, pos",
    "-reward": "reward desc, step desc, pos",
    "-length": "response_len desc, step desc, pos",
    "logp": "mean_logp, step desc, pos",
}  # by the parameter `order`
CONDITIONS = {
    "step": "step = ?",
    "reward_min": "reward >= ?",
    "reward_max": "reward <= ?",
    "status": "status = ?",
    "group": "grp = ?",
    "set": "name = ?",
    "index": "idx = ?",
}  # by the name of a filter


def _where(filters: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    parts: list[str] = []
    values: list[Any] = []
    for name, condition in CONDITIONS.items():
        if filters.get(name) not in (None, ""):
            parts.append(condition)
            values.append(filters[name])
    parts.append("is_eval = 1" if filters.get("set") else "is_eval = 0")
    if text := filters.get("text"):
        escaped = str(text).replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        matching = "select file, pos from texts where prompt like ? escape '\\' or response like ? escape '\\'"
        parts.append(f"(file, pos) in ({matching})")
        values += [f"%{escaped}%"] * 2
    return f"where {' and '.join(parts)}", values


def _forget(db: sqlite3.Connection, path: str) -> None:
    for (number,) in db.execute("select id from files where path = ?", (path,)).fetchall():
        db.execute("delete from samples where file = ?", (number,))
        db.execute("delete from texts where file = ?", (number,))
        db.execute("delete from files where id = ?", (number,))


def _stamp(path: Path) -> str | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return f"{status.st_ino}:{status.st_mtime_ns}:{status.st_size}"


def mask_of(sample: Sample) -> list[int]:
    """Return the loss mask; without one, all response tokens are trained on."""
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


def reward_number(sample: Sample, reward_key: str | None) -> float | None:
    """Return the scalar reward, None if there is none."""
    reward = sample.reward
    if isinstance(reward, dict):
        reward = reward.get(reward_key) if reward_key else None
    return float(reward) if isinstance(reward, int | float) else None
