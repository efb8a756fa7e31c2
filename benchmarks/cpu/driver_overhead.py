"""Measure the driver's overhead per step: everything except the model's computation.

    python benchmarks/cpu/driver_overhead.py

The run is built from flags exactly as `furlong train` builds it. Then stubs replace the model: `generate` returns 32
tokens immediately, the forward pass, backward pass and optimizer step do nothing, and weight updates are skipped. The
driver remains: the data source, one asyncio task per sample, the `math` reward in process, conversion to columns,
micro-batch planning and packing, advantages, loss weights, all metrics, the ledger, metrics.jsonl, TensorBoard and
console output. The table shows this time for growing rollouts; the last column should not grow. The last lines
compare it with a real step on 1,024 samples with a model of one million parameters.

Each figure is the median over the timed steps, with the range in parentheses. `--profile` prints a profile.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import itertools
import logging
import os
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMPLES, NEW = 8, 32


class Stopwatch:
    """A tracker that records the wall and CPU time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:  # noqa: ARG002  the port's signature
        """Record the current wall and CPU time."""
        self.ends.append((time.perf_counter(), time.process_time()))

    def close(self) -> None:
        """Do nothing."""


def build_run(model: Path, data: Path, out: Path, *, samples: int, steps: int) -> Any:
    """Build the parts of a run as `furlong train` does."""
    from furlong.config.command_line import load
    from furlong.core.garbage import import_without_gc, raise_gc_threshold
    from furlong.machine import choose_threads, set_threads

    flags: dict[str, Any] = {
        "--hf-checkpoint": model,
        "--prompt-data": data,
        "--input-key": "prompt",
        "--label-key": "label",
        "--rm-type": "math",
        "--num-rollout": steps,
        "--rollout-batch-size": samples // SAMPLES,
        "--n-samples-per-prompt": SAMPLES,
        "--rollout-max-response-len": NEW,
        "--rollout-shuffle": None,
        "--use-dynamic-batch-size": None,
        "--max-tokens-per-gpu": 8192,
        "--output-dir": out,
    }
    resolved = load([w for k, v in flags.items() for w in (k, *([] if v is None else [str(v)]))])
    raise_gc_threshold(resolved.config.data.rollout_batch_size * resolved.config.data.n_samples_per_prompt)
    with import_without_gc("furlong.wiring.build"):
        set_threads(choose_threads(1, num_parts=1))
        from furlong.wiring.build import build

    out.mkdir(parents=True)
    return build(resolved, out)


def without_model(built: Any) -> Any:
    """Return the same parts with the model's computation stubbed out."""
    from furlong.interfaces import Completion, SamplingParams, WeightSync
    from furlong.training.backend_interface import OptimReport

    answers = [
        Completion(
            tokens=list(range(5, 5 + NEW)),
            log_probs=[-0.5] * NEW,
            versions=[0] * NEW,
            finish_reason="length" if i % 4 == 0 else "stop",
            text=f"the sum is \\boxed{{{i}}}",
        )
        for i in range(64)
    ]
    count = 0

    async def generate(prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:  # noqa: ARG001
        nonlocal count
        count += 1
        await asyncio.sleep(0)
        return answers[count % len(answers)]

    parts, backend = built.parts, built.parts.trainer.worker.backend
    parts.engine.generate = generate
    backend.forward_backward = lambda micro, loss, **role: {}  # noqa: ARG005
    backend.optim_step = lambda **role: OptimReport(grad_norm=1.0, lr=1e-6)  # noqa: ARG005
    return dataclasses.replace(parts, sync=WeightSync())


def step_times(built: Any, parts: Any, profiler: cProfile.Profile | None = None) -> tuple[list[float], list[float]]:
    """Run the loop. Return the wall and CPU seconds of every step except the first."""
    from furlong.loop.train import train

    watch = Stopwatch()
    parts = dataclasses.replace(parts, trackers=[*parts.trackers, watch])

    async def everything() -> None:
        try:
            await train(parts, built.schedule, built.checkpoints)
        finally:
            await built.close()

    if profiler is not None:
        profiler.enable()
    asyncio.run(everything())
    if profiler is not None:
        profiler.disable()
    built.close_files()
    wall, cpu = ([b - a for a, b in itertools.pairwise(times)] for times in zip(*watch.ends, strict=True))
    return wall, cpu


def shown(times: list[float], scale: float = 1.0) -> str:
    """Format the median and range."""
    return f"{statistics.median(times) * scale:8.3f} ({min(times) * scale:.3f} - {max(times) * scale:.3f})"


def main() -> None:
    """Print the table and the comparison with a real step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1024, 4096, 16384, 65536], help="rollout sizes in samples"
    )
    parser.add_argument("--steps", type=int, default=4, help="timed steps per size")
    parser.add_argument("--no-real", action="store_true", help="skip the real step")
    parser.add_argument("--profile", action="store_true", help="print a profile for each size")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    from furlong.models.presets import write_preset
    from furlong.quickstart import addition as task

    logging.getLogger("furlong").setLevel(logging.WARNING)
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = write_preset("tiny", scratch / "tiny", seed=0)
        task.write_prompts(scratch / "problems.jsonl", task.problems(4096, seed=0))
        print("samples  wall s per step               wall s per 1,024 samples      CPU s per 1,024 samples")
        for size in args.sizes:
            out = scratch / f"run{size}"
            built = build_run(model, scratch / "problems.jsonl", out, samples=size, steps=args.steps + 1)
            profiler = cProfile.Profile() if args.profile else None
            wall, cpu = step_times(built, without_model(built), profiler)
            shares = shares or [statistics.median(each) * 1024 / size for each in (wall, cpu)]
            print(
                f"{size:>7}  {shown(wall):<28}  {shown(wall, 1024 / size):<28}  {shown(cpu, 1024 / size)}", flush=True
            )
            if profiler is not None:
                pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(40)
        if args.no_real:
            return
        built = build_run(model, scratch / "problems.jsonl", scratch / "real", samples=1024, steps=args.steps + 1)
        wall, cpu = step_times(built, built.parts)
        by_wall, by_cpu = (own / statistics.median(real) for own, real in zip(shares, (wall, cpu), strict=True))
        print(
            f"a real step of 1,024 samples, tiny model, at most {NEW} new tokens: {shown(wall)} s, CPU {shown(cpu)} s"
        )
        print(f"driver share of the real step: {by_wall:.2%} of wall time, {by_cpu:.2%} of CPU time")


if __name__ == "__main__":
    main()
