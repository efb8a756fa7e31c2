"""`furlong report`: the audit of a run's ledger."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from furlong.commands.output import show
from furlong.data.audit import audit
from furlong.errors import ConfigError


def main(words: list[str]) -> int:
    """Audit a run's ledger; exit code 1 if a group was lost or trained twice."""
    parser = argparse.ArgumentParser(prog="furlong report", allow_abbrev=False, description=main.__doc__)
    run = parser.add_mutually_exclusive_group(required=True)
    run.add_argument("run", nargs="?", metavar="RUN_DIR", help="a run's folder, or its ledger.jsonl")
    run.add_argument("--ledger", metavar="RUN_DIR", help="the same")
    parser.add_argument("--finished", action="store_true", help="the run has ended: groups left in flight are lost")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    path = given = Path(options.run or options.ledger)
    path = path / "ledger.jsonl" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"--ledger {given}: no ledger.jsonl there; give the folder of a run (--output-dir)")
    result = audit(path, finished=options.finished)
    show(json.dumps({"ok": result.ok, "problems": result.problems}) if options.json else result.summary())
    return 0 if result.ok else 1
