"""`furlong bundle`: save one step of a run to a file, for a bug report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from furlong.commands.output import show
from furlong.tools.run_bundle import write_bundle


def main(words: list[str]) -> int:
    """Save one step of a run to a file that `furlong replay` can train again elsewhere.

    The file contains tokens, but no paths, keys or text.
    """
    parser = argparse.ArgumentParser(prog="furlong bundle", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a run that saved its samples")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step number, as in metrics.jsonl")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="output file (default: RUN_NAME-stepN.zip)")
    parser.add_argument("--with-text", action="store_true", help="include prompts, responses, labels and metadata")
    parser.add_argument("--with-checkpoint", action="store_true", help="include the weights before the step")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    output: Path = options.output or Path(f"{options.run.resolve().name}-step{options.step}.zip")
    bundle = write_bundle(
        options.run, options.step, output, with_text=options.with_text, with_checkpoint=options.with_checkpoint
    )
    size = output.stat().st_size
    if options.json:
        show(json.dumps({"file": str(output), "bytes": size, "left_out": bundle.left_out, "has_text": bundle.has_text}))
        return 0
    show(f"{output}: step {bundle.step}, {size / 1024:.0f} KiB, {'with' if bundle.has_text else 'without'} text")
    if bundle.left_out:
        show(f"left out: the values of {', '.join(bundle.left_out)}; describe them in the report")
    if bundle.step > 1 and not bundle.has_checkpoint:
        show("no checkpoint included: a replay starts from --hf-checkpoint, with the same shapes but other numbers")
    return 0
