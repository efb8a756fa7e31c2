"""Held-out accuracy against steps and time on one GPU: `furlong train` and TRL's GRPOTrainer on the same task.

    pip install trl==1.16.0
    python benchmarks/gpu/one_gpu_learning.py --out results --smollm2 DIR
    python benchmarks/gpu/one_gpu_learning.py --out results --smollm2 DIR --seeds 1 --steps 4 --every 2 --prompts 4

The task is sums of two numbers with two digits; SmolLM2-135M-Instruct is rewarded for a correct one. Some problems are
held out; every `--every` steps, greedy answers to them are judged on both sides by furlong's `math` reward. Both sides
have the same problems in each step, GRPO without KL, one AdamW step per rollout and the same learning rate. TRL
computes in bfloat16 and keeps weights in float32, as furlong does: bfloat16 weights would round small steps away.

The seeds of a side run at the same time, so times are longer than in `one_gpu.py`; sides run one after the other. The
time of a step is the sum of a run's steps until then, without imports, loading and evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trl_rival import furlong_words, trl_config

SAMPLES, NEW = 8, 20
Curve = dict[int, tuple[float, float]]
"""By step: accuracy, and the seconds that all steps until then took."""


def problem(a: int, b: int) -> dict[str, Any]:
    """Return a row of the data."""
    text = f"What is {a} plus {b}? Answer with the number only, without any explanation."
    return {"prompt": [{"role": "user", "content": text}], "label": str(a + b)}


def write_data(folder: Path, count: int, seed: int, num_held_out: int) -> tuple[Path, Path]:
    """Write `count` problems in the order of training, and the held-out ones, which are the same for all seeds."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    rest = pairs[num_held_out:]
    rng = random.Random(seed)
    files = folder / f"problems-{seed}.jsonl", folder / "held_out.jsonl"
    for file, chosen in zip(files, ([rng.choice(rest) for _ in range(count)], pairs[:num_held_out]), strict=True):
        file.write_text("".join(json.dumps(problem(*pair)) + "\n" for pair in chosen))
    return files


def furlong_command(options: argparse.Namespace, data: tuple[Path, Path], out: Path, seed: int) -> list[str]:
    """Return the command line of furlong's side."""
    words = furlong_words(
        options.smollm2,
        data[0],
        out,
        prompts=options.prompts,
        samples=SAMPLES,
        new=NEW,
        lr=options.lr,
        rm_type="math",
        num_rollout=options.steps,
        apply_chat_template=True,
        use_dynamic_batch_size=False,
        no_use_tensorboard=True,
        seed=seed,
        rollout_seed=seed,
        eval_prompt_data=("held_out", data[1]),
        eval_interval=options.every,
        eval_temperature=0,
    )
    return [sys.executable, "-m", "furlong", "train", *words, *options.furlong]


def furlong_curve(folder: Path) -> Curve:
    """Return the curve from a run's metrics.jsonl."""
    curve: Curve = {}
    seconds = 0.0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        seconds += row.get("perf/step_time", 0.0)
        if "eval/held_out" in row:
            curve[row["step"]] = row["eval/held_out"], seconds
    return curve


def trl_worker(options: argparse.Namespace, data: tuple[Path, Path], out: Path, seed: int) -> None:
    """Train with TRL and append step, accuracy and seconds to out/curve.jsonl."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from furlong.rewards.algebra import math_score

    has_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(options.smollm2)
    held_out = [json.loads(line) for line in data[1].read_text().splitlines()]

    def reward(completions: list[Any], label: list[str], **kwargs: Any) -> list[float]:  # noqa: ARG001  TRL's signature
        return [
            float(math_score(text[0]["content"], right, {})) for text, right in zip(completions, label, strict=True)
        ]

    def accuracy(model: Any) -> float:
        texts = [
            tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in held_out
        ]
        tokens = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=has_gpu):
            answers = model.generate(**tokens.to(model.device), do_sample=False, max_new_tokens=NEW)
        model.train()
        shown = tokenizer.batch_decode(answers[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
        return fmean(float(math_score(text, row["label"], {})) for text, row in zip(shown, held_out, strict=True))

    class Clock(TrainerCallback):
        began, seconds = 0.0, 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
            self.write(0, model)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
            if has_gpu:
                torch.cuda.synchronize()
            self.seconds += time.perf_counter() - self.began
            if state.global_step % options.every == 0:
                self.write(state.global_step, model)

        def write(self, step: int, model: Any) -> None:
            with (out / "curve.jsonl").open("a") as file:
                file.write(json.dumps([step, accuracy(model), self.seconds]) + "\n")

    total = options.prompts * SAMPLES
    config = trl_config(
        out / "trl",
        samples=SAMPLES,
        new=NEW,
        lr=options.lr,
        max_steps=options.steps,
        bf16=has_gpu,
        use_cpu=not has_gpu,
        per_device_train_batch_size=total,
        gradient_accumulation_steps=1,
        shuffle_dataset=False,
    )
    config.seed = seed
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.smollm2, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([json.loads(line) for line in data[0].read_text().splitlines()]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()


def trl_curve(folder: Path) -> Curve:
    """Return the curve that `trl_worker` wrote."""
    lines = (folder / "curve.jsonl").read_text().splitlines()
    return {step: (accuracy, seconds) for step, accuracy, seconds in map(json.loads, lines)}


def run_side(side: str, options: argparse.Namespace, out: Path) -> dict[int, Curve]:
    """Run all seeds of a side at the same time; return the curve of each, as far as it came."""
    processes: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
    for seed in options.seeds:
        data, folder = write_data(out, options.steps * options.prompts, seed, options.held_out), out / f"{side}-{seed}"
        folder.mkdir(parents=True)
        command = furlong_command(options, data, folder / "run", seed)
        if side == "trl":
            command = [sys.executable, __file__, *sys.argv[1:], "--trl-worker", str(seed)]
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        processes[seed] = process, folder
    deadline = time.monotonic() + options.timeout
    curves: dict[int, Curve] = {}
    for seed, (process, folder) in processes.items():
        try:
            code = process.wait(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = f"stopped after {options.timeout:g} s"
        try:
            curves[seed] = furlong_curve(folder / "run") if side == "furlong" else trl_curve(folder)
        except FileNotFoundError:
            curves[seed] = {}
        if code:
            end = "\n".join((folder / "log.txt").read_text().splitlines()[-15:])
            print(f"{side}, seed {seed}: {code} after step {max(curves[seed], default=None)}\n{end}", flush=True)
    return curves


def report(found: dict[str, dict[int, Curve]]) -> None:
    """Print accuracy and seconds of each side, step and seed."""
    for side, curves in found.items():
        seeds = [seed for seed, curve in curves.items() if curve]
        print(f"\n| {side}: step | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | s |")
        print("|---" * (len(seeds) + 3) + "|")
        for step in sorted({step for curve in curves.values() for step in curve}):
            there = [curves[seed].get(step) for seed in seeds]
            cells = [f"{each[0]:.1%}" if each else "-" for each in there]
            values = [each for each in there if each]
            mean, seconds = fmean(each[0] for each in values), fmean(each[1] for each in values)
            print(f"| {step} | {' | '.join(cells)} | {mean:.1%} | {seconds:.1f} |")


def main() -> None:
    """Run both sides and print the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and learning.json")
    parser.add_argument("--smollm2", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--sides", nargs="+", choices=["furlong", "trl"], default=["furlong", "trl"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--held-out", type=int, default=200, help="problems that are held out")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--timeout", type=float, default=240, help="seconds of a side; evaluations until then count")
    parser.add_argument("--trl-worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("furlong", nargs="*", help="additional flags of `furlong train`, after `--`")
    options = parser.parse_args()
    out = options.out.resolve() / "learning"
    if options.trl_worker is not None:
        data = out / f"problems-{options.trl_worker}.jsonl", out / "held_out.jsonl"
        trl_worker(options, data, out / f"trl-{options.trl_worker}", options.trl_worker)
        return
    out.mkdir(parents=True)
    found = {side: run_side(side, options, out) for side in options.sides}
    (options.out / "learning.json").write_text(json.dumps(found, indent=1) + "\n")
    report(found)


if __name__ == "__main__":
    main()
