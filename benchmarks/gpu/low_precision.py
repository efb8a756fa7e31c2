"""Compare engines in bfloat16, FP8 and INT4 under one bfloat16 trainer: weight updates, rollouts, log-probs.

    python benchmarks/gpu/low_precision.py --shape 0.6b -- --engine sglang --colocate --rollout-num-gpus 1
    python benchmarks/gpu/low_precision.py --shape tiny --new 16 --prompts 4 --prompt-len 32     # on a CPU, embedded

Each precision is one run of `furlong train` on the same random model and prompts, in turn. Every update is verified. A
run that fails is reported with the end of its output, and the others go on. Prints medians of the steps after the
first, and their ratios to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo_step import SAMPLES, write_inputs
from trl_rival import furlong_words

PRECISIONS = {
    "bfloat16": (),
    "fp8": ("hf-to-fp8",),
    "fp8-channel": ("hf-to-fp8", "--strategy", "channel"),
    "int4": ("hf-to-int4", "--group-size", "32"),
    "int4-qat": ("hf-to-int4", "--group-size", "32"),
}
SHOWN = ("perf/update_weights_time", "perf/rollout_time", "perf/tokens_per_gpu_per_sec", "perf/step_time")
GAP = "train/train_rollout_logprob_abs_diff"


def run(name: str, model: Path, data: Path, folder: Path, options: argparse.Namespace) -> list[dict[str, float]] | None:
    """Train with an engine of one precision; returns the rows of metrics.jsonl, or None if the run failed."""
    engine, words = model, list(options.furlong)
    if PRECISIONS[name]:
        engine = folder / "engine"
        command = [sys.executable, "-m", "furlong", "convert", *PRECISIONS[name], str(model), str(engine)]
        subprocess.run(command, check=True, timeout=options.timeout, stdout=subprocess.DEVNULL)
        words += ["--ref-load", str(model)]
    if name == "int4-qat":
        words.append("--int4-qat")
    words = (
        furlong_words(
            engine,
            data,
            folder / "run",
            prompts=options.prompts,
            samples=SAMPLES,
            new=options.new,
            lr=1e-6,
            num_rollout=1 + options.steps,
            num_epoch=1 + options.steps,
            rollout_max_context_len=options.prompt_len + options.new,
            max_tokens_per_gpu=options.max_tokens,
            no_use_tensorboard=True,
        )
        + words
    )
    command = [sys.executable, "-m", "furlong", "train", *words]
    print(f"{name}:", " ".join(command[1:]), flush=True)
    log = folder / "log.txt"
    with log.open("w") as out:
        try:
            code = subprocess.run(command, timeout=options.timeout, stdout=out, stderr=out, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
    metrics = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if code or len(rows) < 2:
        print(f"{name}: exit code {code} after {len(rows)} steps\n" + log.read_text()[-options.log_chars :], flush=True)
        return None
    return rows


def main() -> None:
    """Run all precisions and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", choices=["tiny", "0.6b", "1.7b", "4b"])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bfloat16", "fp8", "int4"])
    parser.add_argument("--steps", type=int, default=2, help="steps after the first one")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32768)
    parser.add_argument("--timeout", type=float, default=600, help="of each run, in seconds")
    parser.add_argument("--log-chars", type=int, default=3000, help="of the output of a failed run that are printed")
    parser.add_argument("furlong", nargs="*", help="additional flags of `furlong train`, after `--`")
    options = parser.parse_args()
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model, data = write_inputs(Path(scratch), options.shape, options.prompts, options.prompt_len)
        for name in options.precisions:
            folder = Path(scratch) / name
            folder.mkdir()
            rows = run(name, model, data, folder, options)
            if rows is None:
                continue
            medians = {
                key: statistics.median(row[key] for row in rows[1:] if key in row) for key in SHOWN if key in rows[1]
            }
            first = first or medians
            shown = ", ".join(f"{key} {value:.3g} ({value / first[key]:.2f} x)" for key, value in medians.items())
            print(f"{name}: {shown}; {GAP} {[round(row[GAP], 4) for row in rows if GAP in row]}", flush=True)


if __name__ == "__main__":
    main()
