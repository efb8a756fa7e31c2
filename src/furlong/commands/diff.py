"""`furlong diff`: find where two runs diverge."""

from __future__ import annotations

import argparse
from pathlib import Path

from furlong.commands.output import findings_code, show, show_findings, show_json
from furlong.tools.run_diff import compare_runs, findings

SHOWN_METRICS = 12


def main(words: list[str]) -> int:
    """Find the first step, stage and value in which two runs differ; exit code 1 if they do."""
    parser = argparse.ArgumentParser(prog="furlong diff", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("run_a", metavar="RUN_A", type=Path, help="run directory (--output-dir)")
    parser.add_argument("run_b", metavar="RUN_B", type=Path, help="the other run directory")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance of metrics (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    found = compare_runs(options.run_a, options.run_b, rtol=options.rtol)
    diagnoses = findings(found)
    if options.json:
        show_json(diagnoses, comparison=found.record())
        return findings_code(diagnoses)
    for m in found.metrics[:SHOWN_METRICS]:
        size = "" if m.largest is None else f"; largest relative difference {m.largest:.2e}"
        show(f"{m.name}: from step {m.step}, {m.a} against {m.b}{size}")
    if len(found.metrics) > SHOWN_METRICS:
        show(f"... and {len(found.metrics) - SHOWN_METRICS} more metrics")
    stages = f"{found.num_stages} stages and " if found.num_stages else ""
    show_findings(diagnoses, well=f"no difference: {stages}all metrics of {found.steps[0]} steps are equal")
    return findings_code(diagnoses)
