"""`furlong quickstart`: train the shipped model with GRPO and compare it before and after."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.table import Table

from furlong.config.command_line import load
from furlong.errors import ConfigError
from furlong.quickstart import addition as task

NUM_ROLLOUT = 80
NUM_ROLLOUT_ASYNC = 120  # a step on samples of the previous policy gains a little less
RUN_FLAGS = ("--output-dir", "--save-debug-rollout-data")  # flags that a second run cannot reuse
SHOWN = 3  # completions to show


def main(words: list[str]) -> int:
    """Run the quickstart; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="furlong quickstart",
        allow_abbrev=False,
        description="Teach a tiny model to carry when adding numbers, in two minutes on a CPU.",
    )
    parser.add_argument("--async", action="store_true", dest="is_async", help="generate one rollout ahead of training")
    parser.add_argument("--seed", type=int, default=42, help="seed of prompts and sampling (default: 42)")
    parser.add_argument(
        "--num-rollout", type=int, help=f"number of rollouts (default: {NUM_ROLLOUT}; {NUM_ROLLOUT_ASYNC} with --async)"
    )
    parser.add_argument("--output-dir", type=Path, default=None, help="run directory (default: outputs/quickstart)")
    options = parser.parse_args(words)
    if options.num_rollout is None:
        options.num_rollout = NUM_ROLLOUT_ASYNC if options.is_async else NUM_ROLLOUT
    if options.num_rollout < 1:
        raise ConfigError(f"--num-rollout {options.num_rollout} is too small; give at least 1")

    from furlong.run.launch import run

    console = Console()
    started = time.monotonic()
    folder = _new_folder(options.output_dir, is_async=options.is_async)
    flags = quickstart_flags(folder, seed=options.seed, num_rollout=options.num_rollout, is_async=options.is_async)
    console.print(
        "A model with one million parameters adds two numbers, but its teacher mostly forgot to carry.\n"
        "Reinforcement learning (GRPO) teaches it to carry; the reward is 1 for a correct sum, else 0.\n",
        soft_wrap=not console.is_terminal,
    )
    run(load(flags))
    _report(console, folder, options.num_rollout, time.monotonic() - started)
    _next(console, folder, flags)
    return 0


def model_folder() -> Path:
    """Return the directory of the shipped initial model."""
    return Path(str(resources.files("furlong.quickstart") / "model"))


def quickstart_flags(folder: Path, *, seed: int, num_rollout: int, is_async: bool) -> list[str]:
    """Write the problems to `folder` and return the flags for `furlong train`."""
    prompts, samples = 64, 8
    train_file, test_file = folder / "problems.jsonl", folder / "held_out.jsonl"
    task.write_prompts(train_file, task.problems(prompts * num_rollout, seed=seed))
    task.write_prompts(test_file, task.held_out_problems())
    flags: dict[str, object] = {
        "--hf-checkpoint": model_folder(),
        "--prompt-data": train_file,
        "--input-key": "prompt",
        "--label-key": "label",
        "--rm-type": "math",
        "--num-rollout": num_rollout,
        "--rollout-batch-size": prompts,
        "--n-samples-per-prompt": samples,
        "--global-batch-size": prompts * samples,
        "--rollout-max-response-len": 8,
        "--advantage-estimator": "grpo",
        "--lr": 1e-4,
        "--use-dynamic-batch-size": (),
        "--max-tokens-per-gpu": 8192,
        "--rollout-seed": seed,
        "--seed": seed,
        "--eval-prompt-data": ("held_out", test_file),
        "--eval-interval": max(num_rollout // 4, 1),
        "--save-debug-rollout-data": folder / "rollouts" / "{rollout_id}.safetensors",
        "--output-dir": folder,
    }
    if is_async:
        flags["--async-buffer-size"] = 1
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in flags.items()}
    return [word for name, items in values.items() for word in (name, *map(str, items))]


def _new_folder(requested: Path | None, *, is_async: bool) -> Path:
    """Create the run directory: the given one, which must be new, or the first free outputs/quickstart*."""
    if requested is not None:
        if (requested / "metrics.jsonl").exists():
            raise ConfigError(f"--output-dir {requested} already contains a run; choose a new directory")
        requested.mkdir(parents=True, exist_ok=True)
        return requested
    from furlong.run.folder import free_folder

    base = Path("outputs") / ("quickstart-async" if is_async else "quickstart")
    folder = free_folder(base)
    folder.mkdir(parents=True)
    return folder


def _report(console: Console, folder: Path, num_rollout: int, seconds: float) -> None:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = {record["step"]: record["eval/held_out"] for record in records if "eval/held_out" in record}
    before, after = accuracy[0], accuracy[num_rollout]
    console.print(
        f"\n[bold]Held-out accuracy: {before:.0%} before, {after:.0%} after[/bold], in {seconds:.0f} s\n"
        f"({task.HELD_OUT} problems that training never sees, sampled at temperature 1)\n"
    )
    table = Table("problem", "right answer", "before", "after")
    for problem, label, old, new in _completions(folder, num_rollout):
        table.add_row(problem, label, _marked(old, label), _marked(new, label))
    console.print(table)


def _completions(folder: Path, num_rollout: int) -> list[tuple[str, str, str, str]]:
    """Return a few problems that need a carry, with the model's answers before and after."""
    from furlong.files.sample_file import load_samples

    first, last = (load_samples(folder / "rollouts" / f"eval_{step}.safetensors") for step in (0, num_rollout))
    rows: list[tuple[str, str, str, str]] = []
    for old_group, new_group in zip(first.groups, last.groups, strict=True):
        old, new = old_group.samples[0], new_group.samples[0]
        a, b = map(int, str(old.prompt).rstrip("=").split("+"))
        if task.sum_without_carry(a, b) != a + b:
            rows.append((str(old.prompt), str(old.label), old.response, new.response))
    return rows[:SHOWN]


def _marked(answer: str, label: str) -> str:
    text = answer.removesuffix("<|im_end|>")
    return f"[green]{text}[/green]" if text == label else f"[red]{text}[/red]"


def _next(console: Console, folder: Path, flags: list[str]) -> None:
    console.print(
        f"\nThe run directory is {folder}: metrics, ledger, rollouts, configuration, TensorBoard files.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print("What to run next:")
    if "--async-buffer-size" in flags:
        other = {"furlong quickstart": "the same without overlap of generation and training"}
    else:
        other = {"furlong quickstart --async": "the same, one rollout in flight ahead of training"}
    commands = {
        shlex.join(["furlong", "view", str(folder)]): "show the run in a browser: curves, samples, prompt groups",
        shlex.join(["tensorboard", "--logdir", str(folder.parent)]): "plot the metrics",
        shlex.join(["furlong", "report", str(folder), "--finished"]): "summarize the run and audit every prompt group",
        **other,
        "furlong train FLAGS": "train your own model on your own data; to repeat this run:",
    }
    for command, what in commands.items():
        console.print(f"  {command}\n      {what}", highlight=False, markup=False, soft_wrap=True)
    again = [word for before, word in zip(["", *flags], flags, strict=False) if not {before, word} & set(RUN_FLAGS)]
    console.print(f"\nfurlong train {shlex.join(again)}", highlight=False, markup=False, soft_wrap=True)
