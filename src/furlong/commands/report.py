"""`furlong report`: what runs came to, and the audit of their ledgers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from furlong.commands.output import show
from furlong.data.audit import audit
from furlong.doctor.summary import as_json, summarize, table
from furlong.errors import ConfigError


def main(words: list[str]) -> int:
    """Show what runs learned and how fast, and audit their ledgers; exit code 1 if a group was lost or used twice."""
    parser = argparse.ArgumentParser(prog="furlong report", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN_DIR", help="folders of runs, or their ledger.jsonl")
    parser.add_argument("--ledger", metavar="RUN_DIR", help="one more, of which only the ledger is audited")
    parser.add_argument("--finished", action="store_true", help="runs have ended: groups left in flight are lost")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    given = [Path(run) for run in [*options.runs, *([options.ledger] if options.ledger else [])]]
    if not given:
        parser.error("name a run's folder")
    ledgers = [path / "ledger.jsonl" if path.is_dir() else path for path in given]
    if problems := [_no_ledger(path) for path, ledger in zip(given, ledgers, strict=True) if not ledger.exists()]:
        raise ConfigError(*problems)
    audits = [audit(ledger, finished=options.finished) for ledger in ledgers]
    summaries = [summarize(ledger.parent) for ledger in ledgers[: len(options.runs)]]
    ok = all(result.ok for result in audits)
    if options.json:
        runs = [as_json(run) for run in summaries]
        found: dict[str, Any] = {"ok": ok, "problems": [line for result in audits for line in result.problems]}
        show(json.dumps(found | ({"runs": runs} if runs else {})))
        return 0 if ok else 1
    parts = [table(summaries)] if summaries else []
    parts += [result.summary() for result in audits if len(audits) == 1 or not result.ok]
    if len(audits) > 1 and ok:
        parts.append("every group of every run is accounted for")
    show("\n\n".join(parts))
    return 0 if ok else 1


def _no_ledger(path: Path) -> str:
    """Why a path cannot be reported on, and the way out."""
    if not path.exists():
        return f"{path}: no such folder; give the folder of a run (--output-dir)"
    runs = sorted(ledger.parent for ledger in path.glob("*/ledger.jsonl"))
    if runs:
        return f"{path}: no ledger.jsonl there, but {len(runs)} runs in it; give {path}/*/ or one, such as {runs[0]}"
    return f"{path}: no ledger.jsonl there: no run in it got as far; leave it out, or give the folder of a run"
