"""Checks of values that name something: files, models, evaluation sets, verifiers."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from furlong.config.compat import VALUES
from furlong.config.task_specs import is_task, tasks_problem
from furlong.core.text import did_you_mean, nearest_path, redact_credentials

_SLICE = re.compile(r"(?P<file>.+)@\[(?P<start>(-?\d+)?):(?P<stop>(-?\d+)?)\]")
_NEARLY_SLICE = re.compile(r"@[(\[]?-?\d*:-?\d*[)\]]?")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DATA_FORMATS = (".jsonl", ".ndjson", ".parquet")
_WITH_PANDAS = "`python -c \"__import__('pandas').{reader}('{{file}}').to_json('{{stem}}.jsonl', {form})\"`"
_FORM = "orient='records', lines=True"
_CONVERSIONS = {
    **{
        suffix: f"convert it, {_WITH_PANDAS.format(reader=reader, form=_FORM)}, or pass the data frame to furlong.train"
        for suffix, reader in ((".csv", "read_csv"), (".tsv", "read_table"), (".xlsx", "read_excel"))
    },
    ".json": "write one object per line: `jq -c '.[]' {file} > {stem}.jsonl`",
    ".gz": "unpack it: `gunzip {file}`",
    ".zip": "unpack it: `unzip {file}`",
}  # of files that are not read
RM_TYPES = ("math", "dapo", "deepscaler", "f1", "gpqa", "ifbench", "reasoning_gym", "remote_rm", "random")
BOXED = "boxed_"  # prefix: only the last box of the response is scored
MAY_NOT_READ = "is not readable by this user; ask its owner for read permission, or for a copy"


def split_slice(path: str) -> tuple[str, int | None, int | None]:
    """Return file, start and stop of `FILE@[a:b]`; a path without a slice is returned unchanged.

    >>> split_slice("train.jsonl@[100:]")
    ('train.jsonl', 100, None)
    """
    match = _SLICE.fullmatch(path)
    if match is None:
        return path, None, None
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["file"], start, stop


def prompt_file_problem(flag: str, path: str) -> str | None:
    """Return why `path`, with an optional slice, cannot be read as prompts; None if it can."""
    if is_task(path):
        return tasks_problem(flag, split_slice(path)[0])
    file = Path(split_slice(path)[0])
    if (sliced := re.fullmatch(r"(.+\w)(\[-?\d*:-?\d*\])", path)) and os.path.exists(sliced[1]):
        return f"{flag} {path}: no such file; to select rows, write '{sliced[1]}@{sliced[2]}'"
    if os.path.isfile(file / "config.json"):
        return f"{flag} {path} is a model folder; give a .jsonl or .parquet file, and the model to --hf-checkpoint"
    if "@[" in file.name or (_NEARLY_SLICE.search(file.name) and not os.path.exists(file)):
        return f"{flag} {path}: the part after @ is not a slice; write FILE@[start:stop] with whole numbers"
    if "://" in path:
        return f"{flag} {path}: URLs are not downloaded; download it first (`curl -LO URL`), and give the file"
    if (pattern := _pattern_problem(path)) is not None:
        return f"{flag} {path}: {pattern}"
    if not os.path.exists(file):  # Path.exists raises if a parent directory is not accessible
        on_hub = _HUB_NAME.fullmatch(path) and file.suffix not in DATA_FORMATS
        fix = f", or write {path}:SPLIT for a data set on the Hub" if on_hub else ""
        fix = fix or (", or write OWNER/NAME:SPLIT for a data set on the Hub" if path.isidentifier() else "")
        return f"{flag} {path}: no file {file}; {nearest_path(file)}{fix}"
    if unreadable := unreadable_file(file):
        return f"{flag} {path}: {unreadable} {MAY_NOT_READ}"
    if file.is_file() and file.suffix not in DATA_FORMATS:
        fix = _CONVERSIONS.get(file.suffix, "give .jsonl or .parquet").format(file=file, stem=file.with_suffix(""))
        return f"{flag} {path}: the format {file.suffix or '(no suffix)'} is not read; {fix}"
    return None


def join_command(pattern: str) -> str:
    """Return a command that joins the files of a pattern into one."""
    if pattern.endswith(".parquet"):
        load = f"__import__('datasets').load_dataset('parquet', data_files='{pattern}', split='train')"
        return f"`python -c \"{load}.to_parquet('all.parquet')\"`"
    return f"`cat {pattern} > all.jsonl`"


def _pattern_problem(path: str) -> str | None:
    """Return what to write instead of `*.jsonl`, `NAME:FILE` and `NAME=FILE`; None for other paths."""
    if os.path.exists(path):
        return None
    if re.search(r"[*?]", path):
        return f"patterns are not expanded; join the files into one, {join_command(path)}"
    named = re.fullmatch(r"([\w-]+)[:=](.+)", path)
    return f"no such file; write {named[1]} {named[2]}" if named is not None and os.path.exists(named[2]) else None


def set_name_problem(flag: str, name: str) -> str | None:
    """Return why an evaluation set cannot have this name; None if it can."""
    if Path(name).suffix in DATA_FORMATS:
        return f"{flag} {name} is in the place of a name; write NAME FILE for each set"
    return f"{flag} {name}: it becomes part of a metric's name; use a name without /" if "/" in name else None


def model_problem(flag: str, path: str) -> str | None:
    """Return why `path` is not a readable model directory; None if it is."""
    folder = Path(path)
    if os.path.isdir(folder):
        unreadable = unreadable_file(folder)
        return f"{flag} {path}: {unreadable} {MAY_NOT_READ}" if unreadable else None
    if os.path.exists(folder):
        return f"{flag} {path} is a file; give the directory that contains config.json"
    if (page := re.fullmatch(r"https?://[^/]+/([\w.-]+/[\w.-]+)(/.*)?", path)) is not None:
        return f"{flag} {path} is a web page; write the name, {page[1]}, or the path of a folder"
    fix = f", or write {path}@main for a model on the Hub" if _HUB_NAME.fullmatch(path) else ""
    fix = fix or ("" if os.sep in path else "; names on the Hub have an owner: OWNER/NAME")
    return f"{flag} {path}: no such directory; {nearest_path(folder)}{fix}"


def unreadable_file(path: Path) -> Path | None:
    """Return `path`, or the first file in it, if this user cannot read it; None if all are readable."""
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        return path
    files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else []
    return next((file for file in files if not os.access(file, os.R_OK)), None)


def verifier_problem(where: str, name: str) -> str | None:
    """Return why `name`, given by `where`, is not a verifier; None if it is.

    >>> verifier_problem("--rm-type", "gqpa").split("; ")
    ['--rm-type gqpa is not a verifier', 'did you mean gpqa?']
    """
    inner = name.removeprefix(BOXED)
    if (why := VALUES.get(("--rm-type", name)) or VALUES.get(("--rm-type", inner))) is not None:
        return why.message(f"{where} {name}")
    if inner == "ifbench" and find_spec("if_verifiable") is None:
        return (
            f"{where} {name} needs the package if-verifiable, which is not installed; pip install 'furlong-rl[ifbench]'"
        )
    if inner in RM_TYPES:
        return None
    if ".py:" in name:
        return f"{where} {name} is not a verifier; use --custom-rm-path {name}"
    _, hint = did_you_mean(name, [*RM_TYPES, *(BOXED + known for known in RM_TYPES)])
    ways = f"use one of {', '.join(RM_TYPES)}, each also as {BOXED}<name>, or --custom-rm-path"
    return f"{where} {name} is not a verifier; {hint or ways}"


def url_problem(flag: str, url: str) -> str | None:
    """Return why `url` is not an address of an HTTP server; None if it is. What precedes an @ is not shown.

    >>> url_problem("--rm-url", "me:secret@host/score")
    '--rm-url ***@host/score is not a URL; use http://HOST:PORT/PATH, with special characters percent-encoded'
    """
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not re.search(r"\s", url):
            return None
    except ValueError:  # the port is not a number
        pass
    _, at, address = url.rpartition("@")
    shown = f"***@{redact_credentials(address)}" if at else redact_credentials(url)
    return f"{flag} {shown} is not a URL; use http://HOST:PORT/PATH, with special characters percent-encoded"
