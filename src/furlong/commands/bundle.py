"""`furlong bundle`: one step of a run in one file, for a report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from furlong.commands.output import show
from furlong.tools.bundle import write_bundle


def main(words: list[str]) -> int:
    """Write one step of a run to a file that `furlong replay` trains again elsewhere.

    No paths, keys or text are in it; the tokens are.
    """
    parser = argparse.ArgumentParser(prog="furlong bundle", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run that kept its samples")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step, as in metrics.jsonl")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to (RUN_NAME-stepN.zip)")
    parser.add_argument("--with-text", action="store_true", help="keep prompts, responses, labels and metadata")
    parser.add_argument("--with-checkpoint", action="store_true", help="add the trainer's weights before the step")
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
        show(f"not in it: the values of {', '.join(bundle.left_out)}; say in the report what they are")
    if bundle.step > 1 and not bundle.has_checkpoint:
        show("without --with-checkpoint it is trained from the weights of --hf-checkpoint: other numbers, same shapes")
    return 0
