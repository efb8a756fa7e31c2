"""`furlong trace`: merge the trace files of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from furlong.commands.output import show
from furlong.core.tracing import merge
from furlong.errors import ConfigError


def main(words: list[str]) -> int:
    """Merge the trace files of a killed run into `trace.json`, for ui.perfetto.dev; other runs do so at their end."""
    parser = argparse.ArgumentParser(prog="furlong trace", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="run directory (--output-dir)")
    folder = parser.parse_args(words).run
    if not any((folder / "trace").glob("*.jsonl")):
        raise ConfigError(f"{folder} has no trace; train with --trace, and give the run directory (--output-dir)")
    target = folder / "trace.json"
    show(f"{merge(folder / 'trace', target)} events in {target}; open it in ui.perfetto.dev")
    return 0
