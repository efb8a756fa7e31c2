"""Time a full GRPO step: furlong with SGLang against TRL's GRPOTrainer on one GPU, or furlong on several GPUs.

    pip install trl==1.16.0
    python benchmarks/gpu/grpo_step.py --shape 0.6b
    python benchmarks/gpu/grpo_step.py --shape 0.6b --trl-engine vllm     # colocated, asleep while TRL trains
    python benchmarks/gpu/grpo_step.py --shape 0.6b --no-furlong --trl-steps 0     # one step, warm-up included
    python benchmarks/gpu/grpo_step.py --shape 4b --trl-rows 8 --trl-generation-rows 128   # TRL needs minutes a step
    python benchmarks/gpu/grpo_step.py --shape 1.7b --prompts 256 --steps 8 --gpus 1 2 4 8
    python benchmarks/gpu/grpo_step.py --shape 30b-a3b --steps 8 --gpus 8 -- --rollout-num-gpus-per-engine 2

With `--gpus`, only furlong runs, once for each layout: `N` GPUs colocated, or `A+B`, A for training and B for
generation, with one rollout ahead. Steps are the second half of those that were run, since the first ones compile.
`scaling` is samples per second per GPU divided by that of the first layout. Flags after `--` are added to all runs.

Without it, both sides train the same random Qwen3 model in bfloat16 on the same prompts (64 prompts of 512 tokens, 8
samples each) with a random reward and up to 1,024 new tokens. The vocabulary has 151,936 tokens and one end-of-sequence
token, so fewer than 1 % of responses stop early. GRPO runs without KL, with one AdamW step per rollout. Step time is
measured from the end of one step to the end of the next: generation, reward, loss, backward pass, optimizer step,
memory hand-over between trainer and engine, and the weight update.

Precision favors TRL: it keeps weights and AdamW states in bfloat16, while furlong keeps float32 master weights and
moments. TRL trains `--trl-rows` sequences at a time and generates `--trl-generation-rows` at a time; set both to the
largest values that fit. The script prints TRL's peak memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # train_mfu
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trl_rival import furlong_words, random_reward, trl_config

SAMPLES, PROMPT, NEW = 8, 512, 1024
LR = 1e-6
SHAPE_NAMES = ("tiny", "0.6b", "1.7b", "4b", "8b", "30b-a3b", "tiny-moe")  # of train_mfu, which imports torch


def write_inputs(folder: Path, shape: str, prompts: int, prompt_len: int) -> tuple[Path, Path]:
    """Write a random model with a character tokenizer, and distinct prompts of `prompt_len` tokens."""
    import torch
    from train_mfu import SHAPES, write_random_model

    from furlong.models.tokenizer import build_tokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = folder / "model"
    write_random_model(SHAPES[shape], model, device)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(model)
    for name in ("config.json", "generation_config.json"):
        path = model / name
        values = json.loads(path.read_text()) | {"eos_token_id": tokenizer.eos_token_id}
        path.write_text(json.dumps(values | {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}))
    data = folder / "prompts.jsonl"
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz "
    texts = ["".join(rng.choice(letters) for _ in range(prompt_len)) for _ in range(prompts)]
    data.write_text("".join(json.dumps({"prompt": text, "label": "0"}) + "\n" for text in texts))
    return model, data


def layout_words(layout: str, engine: str) -> list[str]:
    """Return the flags of a layout, `N` or `A+B` GPUs."""
    train, _, generate = layout.partition("+")
    words = ["--engine", engine, "--actor-num-gpus-per-node", train, "--rollout-num-gpus", generate or train]
    return [*words, *(["--async-buffer-size", "1"] if generate else ["--colocate"])]


def furlong_steps(
    model: Path, data: Path, output: Path, options: argparse.Namespace, layout: list[str]
) -> list[dict[str, float]]:
    """Train with `furlong train`, print its steps and return the rows of metrics.jsonl that count."""
    words = furlong_words(
        model,
        data,
        output,
        prompts=options.prompts,
        samples=SAMPLES,
        new=options.new,
        lr=LR,
        num_rollout=1 + options.steps,
        num_epoch=1 + options.steps,
        rollout_max_context_len=options.prompt_len + options.new,
        no_use_tensorboard=True,
        no_save_model=True,
        **({"max_tokens_per_gpu": options.max_tokens} if options.max_tokens else {"use_dynamic_batch_size": False}),
    )
    command = [sys.executable, "-m", "furlong", "train", *words, *layout, *options.furlong]
    print("furlong:", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, timeout=options.timeout)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        shown = {n: round(v, 3) for n, v in row.items() if n.startswith("perf/") and n.endswith("time")}
        print(f"furlong step {row['step']}: {shown}", flush=True)
    return rows[len(rows) // 2 :]


def layouts_table(steps: dict[str, list[dict[str, float]]], samples: int) -> str:
    """Return the medians of each layout in Markdown."""
    columns = {
        "step, s": ("step_time",),
        "rollout": ("rollout_time",),
        "training": ("train_time",),
        "weight update": ("update_weights_time",),
        "hand-over": ("sleep_time", "wake_up_time", "offload_rollout_time", "onload_rollout_time"),
    }
    lines = [f"| GPUs | {' | '.join(columns)} | samples/s | scaling |", "|---" * (len(columns) + 3) + "|"]
    first = 0.0
    for layout, rows in steps.items():
        sums = [[sum(row.get(f"perf/{name}", 0.0) for name in names) for row in rows] for names in columns.values()]
        medians = [statistics.median(each) for each in sums]
        speed = samples / medians[0]
        each = speed / sum(map(int, layout.split("+")))
        first = first or each
        cells = [*(f"{seconds:.2f}" for seconds in medians), f"{speed:.1f}", f"{each / first:.3f}"]
        lines.append(f"| {layout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def trl_steps(model: Path, data: Path, folder: Path, options: argparse.Namespace) -> list[float]:
    """Run TRL in a subprocess and return the seconds of each step after the first."""
    result = folder / "trl.json"
    command = [sys.executable, __file__, "--trl-worker", str(model), str(data), str(result)]
    command += ["--trl-steps", str(options.trl_steps), "--prompts", str(options.prompts), "--new", str(options.new)]
    command += ["--prompt-len", str(options.prompt_len), "--trl-rows", str(options.trl_rows)]
    command += ["--trl-generation-rows", str(options.trl_generation_rows)]
    command += ["--trl-engine", options.trl_engine, "--trl-vllm-frac", str(options.trl_vllm_frac)]
    paths = [str(options.trl_path)] if options.trl_path else []
    env = os.environ | {"PYTHONPATH": ":".join([*paths, os.environ.get("PYTHONPATH", "")])}
    try:
        subprocess.run(command, check=True, timeout=options.timeout, env=env)
    except subprocess.TimeoutExpired:
        print(f"TRL: stopped after {options.timeout:g} s; only completed steps count", flush=True)
    answer = json.loads(result.read_text())
    print(f"TRL: generation {answer['generate']} s, peak {answer['peak_gib']:.1f} GiB", flush=True)
    print(f"TRL: step times {answer['seconds']} s", flush=True)
    return answer["seconds"][1:] or answer["seconds"]


def worker_config(result: Path, options: argparse.Namespace) -> Any:
    """Return TRL's configuration, including the engine's."""
    import torch

    engine: dict[str, Any] = {}
    if options.trl_engine == "vllm":
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": options.trl_vllm_frac,
            "vllm_max_model_length": options.prompt_len + options.new,
            "vllm_enable_sleep_mode": True,
        }
    return trl_config(
        result.parent / "trl",
        samples=SAMPLES,
        new=options.new,
        lr=LR,
        max_steps=1 + options.trl_steps,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=options.trl_rows,
        gradient_accumulation_steps=options.prompts * SAMPLES // options.trl_rows,
        generation_batch_size=options.trl_generation_rows or options.prompts * SAMPLES,
        gradient_checkpointing=True,
        **engine,
    )


def trl_worker(model: Path, data: Path, result: Path, options: argparse.Namespace) -> None:
    """Train with TRL and write its step times."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    marks: list[float] = []
    generating: list[float] = []

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any) -> Any:
            began = time.perf_counter()
            answer = super()._generate(*args)
            generating.append(round(time.perf_counter() - began, 1))
            print(f"TRL: generation {len(generating)} took {generating[-1]} s", flush=True)
            return answer

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            seconds = [round(after - before, 2) for before, after in itertools.pairwise(marks)]
            print(f"TRL: step {len(seconds)} took {seconds[-1]} s", flush=True)
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            result.write_text(json.dumps({"seconds": seconds, "generate": generating, "peak_gib": peak}))

    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16),
        reward_funcs=random_reward(),
        args=worker_config(result, options),
        train_dataset=Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Clock()],
    )
    marks.append(time.perf_counter())
    trainer.train()


def main() -> None:
    """Time furlong and TRL, and print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="0.6b", choices=SHAPE_NAMES)
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one warm-up step")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=PROMPT)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="maximum tokens of furlong's micro-batches (default: 32768; with --gpus by memory)",
    )
    parser.add_argument("--gpus", nargs="+", metavar="N|A+B", help="layouts of furlong, without a rival")
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang", help="of these layouts")
    parser.add_argument("--trl-rows", type=int, default=16, help="sequences per TRL training micro-batch")
    parser.add_argument(
        "--trl-generation-rows", type=int, default=0, help="sequences per TRL generation batch; 0: all of a step"
    )
    parser.add_argument("--trl-steps", type=int, default=2, help="timed steps of TRL; 0 times the warm-up step")
    parser.add_argument("--trl-engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--trl-vllm-frac", type=float, default=0.5, help="fraction of GPU memory for vLLM")
    parser.add_argument(
        "--trl-path", type=Path, help="directory added to PYTHONPATH for TRL only, such as one with vLLM"
    )
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--no-rival", action="store_true")
    parser.add_argument("--no-furlong", action="store_true")
    parser.add_argument("--trl-worker", nargs=3, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("furlong", nargs="*", help="additional flags of `furlong train`, after `--`")
    options = parser.parse_args()
    if options.trl_worker:
        trl_worker(*options.trl_worker, options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, data = write_inputs(folder, options.shape, options.prompts, options.prompt_len)
        if options.gpus:
            steps: dict[str, list[dict[str, float]]] = {}
            for each in options.gpus:
                try:
                    steps[each] = furlong_steps(model, data, folder / each, options, layout_words(each, options.engine))
                except subprocess.CalledProcessError as error:
                    print(f"{each}: exit code {error.returncode}", flush=True)
            print(layouts_table(steps, options.prompts * SAMPLES))
            return
        options.max_tokens = options.max_tokens or 32768
        ours = None
        if not options.no_furlong:
            rows = furlong_steps(model, data, folder / "run", options, [])
            ours = statistics.median(row["perf/step_time"] for row in rows)
            print(f"furlong: {ours:.2f} s/step", flush=True)
        if options.no_rival:
            return
        theirs = statistics.median(trl_steps(model, data, folder, options))
        print(f"TRL with {options.trl_engine}: {theirs:.2f} s/step")
        if ours is not None:
            print(f"furlong is {theirs / ours:.2f} times as fast")


if __name__ == "__main__":
    main()
