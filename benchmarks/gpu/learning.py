"""Check that the quickstart task learns equally well on other engines and placements.

    python benchmarks/gpu/learning.py --name embedded
    python benchmarks/gpu/learning.py --name colocated -- --engine sglang --rollout-num-gpus 1 --colocate
    python benchmarks/gpu/learning.py --name "2 GPUs" -- --engine sglang --rollout-num-gpus 1 --ray-address auto

Everything after `--` is passed to `furlong train` after the flags of `furlong quickstart`. The script prints the
held-out accuracy at every evaluation, the log-prob difference between engine and trainer in the first step, and the
step time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from furlong.quickstart.quickstart import quickstart_flags


def main() -> int:
    """Train and print the learning curve; return 1 if accuracy rises by less than 40 points."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", default="run")
    parser.add_argument("--num-rollout", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=500.0, help="time limit of the run in seconds")
    parser.add_argument("--json", type=Path, help="also write the curve to this file")
    parser.add_argument("train", nargs="*", help="flags of furlong train, after `--`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        folder.mkdir()
        flags = quickstart_flags(folder, seed=options.seed, num_rollout=options.num_rollout, is_async=False)
        command = [sys.executable, "-m", "furlong", "train", *flags, *options.train]
        subprocess.run(command, check=True, timeout=options.timeout)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = {row["step"]: row["eval/held_out"] for row in rows if "eval/held_out" in row}
    trained = [row for row in rows if "perf/step_time" in row]
    gap = trained[0]["train/train_rollout_logprob_abs_diff"]
    step_s = statistics.median(row["perf/step_time"] for row in trained)
    print(f"{options.name}: " + ", ".join(f"{step}: {100 * value:.1f} %" for step, value in curve.items()))
    print(f"{options.name}: engine and trainer log-probs differ by {gap:.2e} in step 1; {step_s:.2f} s/step")
    if options.json:
        options.json.write_text(json.dumps({"name": options.name, "curve": curve, "gap": gap, "step_s": step_s}))
    return 0 if curve[max(curve)] - curve[min(curve)] >= 0.4 else 1


if __name__ == "__main__":
    sys.exit(main())
