"""Trains the initial model of the quickstart with SFT: `python -m furlong.quickstart.make_model DIR`.

A random model of one million parameters learns from the teacher that forgets to carry. Takes a few minutes on two
cores; the result is reproducible on the same machine.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

RIGHT = 0.15  # fraction of correct demonstrations
STEPS, BATCH = 900, 256


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write the model."""
    parser = argparse.ArgumentParser(prog="python -m furlong.quickstart.make_model", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="directory to write")
    parser.add_argument("--num-rollout", type=int, default=STEPS, help=f"SFT steps, default {STEPS}")
    options = parser.parse_args(argv)

    from furlong.config.command_line import load
    from furlong.models.presets import write_preset
    from furlong.quickstart import addition as task
    from furlong.run.launch import run

    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_preset("tiny", work / "random", seed=0)
        task.write_demonstrations(
            work / "teacher.jsonl", task.problems(BATCH * options.num_rollout, seed=1), right=RIGHT, seed=2
        )
        task.write_prompts(work / "held_out.jsonl", task.held_out_problems())
        flags = {
            "--hf-checkpoint": work / "random",
            "--prompt-data": work / "teacher.jsonl",
            "--input-key": "prompt",
            "--label-key": "label",
            "--loss-type": "sft_loss",
            "--num-rollout": options.num_rollout,
            "--rollout-batch-size": BATCH,
            "--global-batch-size": BATCH,
            "--micro-batch-size": BATCH,
            "--lr": 1e-3,
            "--lr-decay-style": "linear",
            "--lr-warmup-fraction": 0.1,
            "--min-lr": 1e-4,
            "--adam-beta2": 0.98,
            "--seed": 0,
            "--rm-type": "math",
            "--eval-prompt-data": f"held_out {work / 'held_out.jsonl'}",
            "--eval-interval": 100,
            "--eval-max-response-len": 8,
            "--save": work / "checkpoints",
            "--save-interval": options.num_rollout,
            "--save-hf": work / "hf_{rollout_id}",
            "--output-dir": work / "run",
        }
        run(load([word for name, value in flags.items() for word in (name, *str(value).split())]))
        export(work / f"hf_{options.num_rollout}", options.folder)
    return 0


def export(trained: Path, folder: Path) -> None:
    """Save the model in bfloat16, which halves its size."""
    import torch

    from furlong.models.hf_model import load_model, save_model
    from furlong.models.tokenizer import load_tokenizer

    save_model(load_model(trained, dtype=torch.bfloat16), folder)
    load_tokenizer(trained).save_pretrained(folder)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
