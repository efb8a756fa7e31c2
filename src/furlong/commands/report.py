"""`furlong report`: summarize runs and audit their ledgers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from furlong.commands.output import show
from furlong.data.audit import audit
from furlong.errors import ConfigError
from furlong.tools.run_summary import as_json, summarize, table


def main(words: list[str]) -> int:
    """Summarize rewards and speed of runs, and audit their ledgers; exit code 1 if a group was lost or used twice."""
    parser = argparse.ArgumentParser(prog="furlong report", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN_DIR", help="run directories, or their ledger.jsonl")
    parser.add_argument("--ledger", metavar="RUN_DIR", help="another run, used only to audit its ledger")
    parser.add_argument(
        "--finished",
        action="store_true",
        help="runs are complete: count groups still in flight as lost, except those kept for a larger --num-rollout",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    runs = [Path(run) for run in options.runs]
    given = [*runs, *([Path(options.ledger)] if options.ledger else [])]
    if not given:
        parser.error("name a run directory")
    without = [path for path in given if not _ledger(path).exists()]
    ended_before = [path for path in without if (path / "config.json").is_file()]  # Ctrl-C while it starts, for example
    if without and (without != ended_before or without == given):
        raise ConfigError(*(_no_ledger(path) for path in without))
    for path in ended_before:
        print(f"skipped {path}: no ledger.jsonl; the run ended before the first rollout", file=sys.stderr)
    audits = [audit(_ledger(path), finished=options.finished) for path in given if path not in without]
    summaries = [summarize(_ledger(path).parent) for path in runs if path not in without]
    ok = all(result.ok for result in audits)
    if options.json:
        shown = [as_json(run) for run in summaries]
        found: dict[str, Any] = {"ok": ok, "problems": [line for result in audits for line in result.problems]}
        show(json.dumps(found | ({"runs": shown} if shown else {})))
        return 0 if ok else 1
    parts = [table(summaries)] if summaries else []
    parts += [result.summary() for result in audits if len(audits) == 1 or not result.ok]
    if len(audits) > 1 and ok:
        parts.append("every group of every run is accounted for")
    show("\n\n".join(parts))
    return 0 if ok else 1


def _ledger(path: Path) -> Path:
    """Return the ledger of a run directory; another path is the ledger itself."""
    return path / "ledger.jsonl" if path.is_dir() else path


def _no_ledger(path: Path) -> str:
    """Return the problem of a path without a ledger."""
    if not path.exists():
        return f"{path}: no such directory; give a run directory (--output-dir)"
    runs = sorted(ledger.parent for ledger in path.glob("*/ledger.jsonl"))
    if runs:
        return (
            f"{path}: no ledger.jsonl, but {len(runs)} runs below it; give {path}/*/ or one of them, such as {runs[0]}"
        )
    return f"{path}: no ledger.jsonl; give a run directory (--output-dir)"
