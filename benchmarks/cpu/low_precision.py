"""Learning with quantized engines: the quickstart's task with engines in float32, FP8 and INT4, and INT4 with QAT.

    python benchmarks/cpu/low_precision.py --num-rollout 80 --out outputs/low-precision

All variants have the same prompts, seed and number of samples; the trainer computes in float32. Prints held-out
accuracy before and after, and the mean difference of log-probs between engine and trainer over the run, for each seed
and as means over the seeds. About one minute a run on two cores; runs that have ended in --out are not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from furlong import Run
from furlong.config.command_line import load
from furlong.quantization.fp8 import Fp8Blocks
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.weight_format import WeightFormat
from furlong.quickstart.quickstart import model_folder, quickstart_flags
from furlong.run.launch import run
from furlong.tools.quantize_folder import quantize_folder

GROUP = 32
VARIANTS: dict[str, tuple[WeightFormat | None, tuple[str, ...]]] = {
    "float32": (None, ()),
    "FP8, blocks of 128 x 128": (Fp8Blocks((128, 128)), ()),
    f"INT4, groups of {GROUP}": (Int4Groups(GROUP), ()),
    f"INT4, groups of {GROUP}, TIS": (Int4Groups(GROUP), ("--use-tis",)),
    f"INT4, groups of {GROUP}, QAT": (Int4Groups(GROUP), ("--int4-qat",)),
}


def train(
    folder: Path, form: WeightFormat | None, words: tuple[str, ...], *, num_rollout: int, seed: int, threads: int
) -> None:
    """Run one variant in a new folder, unless it has ended there."""
    if Run(folder / "run").exit_code == 0:
        return
    run_folder, quantized = folder / "run", folder / "model"
    run_folder.mkdir(parents=True)
    flags = quickstart_flags(run_folder, seed=seed, num_rollout=num_rollout, is_async=False)
    if form is not None:
        quantized.mkdir()
        quantize_folder(model_folder(), quantized, form)
        flags += ["--hf-checkpoint", str(quantized), "--ref-load", str(model_folder())]
    run(load([*flags, *words, "--num-threads", str(threads)]))


def results(folder: Path) -> tuple[float, float, float]:
    """Return accuracy before and after, and the mean difference of log-probs, of a finished run."""
    rows = Run(folder / "run").rows
    accuracy = [row["eval/held_out"] for row in rows if "eval/held_out" in row]
    gaps = [
        row["train/train_rollout_logprob_abs_diff"] for row in rows if "train/train_rollout_logprob_abs_diff" in row
    ]
    return accuracy[0], accuracy[-1], fmean(gaps)


def add_row(table: Table, name: str, seed: str, figures: tuple[float, float, float]) -> None:
    """Add what `results` returned to the table."""
    before, after, gap = figures
    table.add_row(name, seed, f"{before:.1%}", f"{after:.1%}", f"{gap:.2g}")


def main() -> None:
    """Run all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rollout", type=int, default=80)
    parser.add_argument("--seed", type=int, nargs="+", default=[42])
    parser.add_argument(
        "--variants",
        type=int,
        nargs="+",
        choices=range(len(VARIANTS)),
        default=range(len(VARIANTS)),
        help="numbers of the variants: " + ", ".join(f"{i} {name}" for i, name in enumerate(VARIANTS)),
    )
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="new folder for the runs")
    options = parser.parse_args()
    table = Table("engine", "seed", "before", "after", "mean log-prob difference")
    for number, (name, (form, words)) in enumerate(VARIANTS.items()):
        if number not in options.variants:
            continue
        figures: list[tuple[float, float, float]] = []
        for seed in options.seed:
            folder = options.out / f"{number}-{seed}"
            train(folder, form, words, num_rollout=options.num_rollout, seed=seed, threads=options.num_threads)
            figures.append(results(folder))
            add_row(table, name, str(seed), figures[-1])
        if len(figures) > 1:
            before, after, gap = (fmean(column) for column in zip(*figures, strict=True))
            add_row(table, name, "mean", (before, after, gap))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
