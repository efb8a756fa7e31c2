"""Compare `furlong train` without tuning flags with TRL's GRPOTrainer on one GPU, row by row.

    pip install trl==1.16.0
    python benchmarks/gpu/one_gpu.py --out results --smollm2 DIR            # all rows, both sides
    python benchmarks/gpu/one_gpu.py --out results --smollm2 DIR --rows smol-20 --steps 12 --timeout 120
    python benchmarks/gpu/one_gpu.py --out results --smollm2 DIR --profile --rows smol-20
    python benchmarks/gpu/one_gpu.py --out results --rows 0.6b-1024 --sides sglang     # furlong with --engine sglang
    python benchmarks/gpu/one_gpu.py --out results --rows 0.6b-256 --sides furlong trl-vllm      # needs vllm, too

A row is a model, a number of prompts with 8 samples each and a response length. Both sides train on the same prompts
with a random reward, GRPO without KL and one AdamW step per rollout, each in its own process, one after the other.
furlong runs with its defaults: no flag about slots, micro-batches or attention. TRL runs with its defaults and the
transformers engine, except that its batch sizes must be given: all samples of a step are generated as one batch (with
1,024 new tokens in two, since the keys and values of 512 sequences fill the GPU), and trained in micro-batches of the
row's `trl_rows` sequences. Weights are bfloat16 on both sides. TRL also keeps AdamW's states in bfloat16, and furlong
keeps float32 master weights and moments. The side `sglang` is furlong with one more flag, `--engine sglang`. The side
`trl-vllm` is TRL with `use_vllm` in its own process (`colocate`) and TRL's defaults for vLLM's memory; all samples of a
step are one batch.

Step times are taken by this process when a side reports the end of a step, and the median excludes the first two steps
(the first one if there are fewer than five). A side with a single step is timed from the begin of its step, without
imports and loading, and is marked: it includes warm-up. `to step 10` is the time from the start of the process to the
end of step 10, imports, model loading and warm-up included.

`--profile` runs the PyTorch profiler instead: 20 decode steps of the embedded engine at the row's size, and one
training step of `furlong train`. It prints kernels, launches, synchronizations and copies, and the busiest operators.

`results/one_gpu.json` has everything that is printed, and `results/<row>-<side>.log` what each side printed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # train_mfu
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trl_rival import furlong_words, random_reward, trl_config

SAMPLES = 8
LR = 1e-6
SIDES = ("furlong", "trl", "sglang", "trl-vllm")
TRL_SIDES = ("trl", "trl-vllm")
POLL_S = 0.01
EARLY_STEP = 10
PROFILED_STEPS, WARM_STEPS = 20, 30
SYNCHRONIZATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Row:
    """A setting: model, prompts, prompt tokens (0: real questions), new tokens, default steps, and TRL's batches.

    trl_rows: sequences of TRL's micro-batches. trl_parts: batches in which TRL generates the samples of a step.
    """

    model: str
    prompts: int
    prompt_len: int
    new: int
    trl_rows: int
    steps: int
    trl_parts: int = 1


ROWS = {
    "tiny": Row("tiny", 4, 16, 16, 32, 12),
    "smol-20": Row("smollm2", 32, 0, 20, 256, 12),
    "smol-256": Row("smollm2", 64, 0, 256, 64, 12),
    "0.6b-256": Row("0.6b", 64, 128, 256, 32, 5),
    "0.6b-1024": Row("0.6b", 64, 128, 1024, 16, 3, 2),
    "1.7b-256": Row("1.7b", 64, 128, 256, 32, 4),
    "1.7b-1024": Row("1.7b", 64, 128, 1024, 16, 3, 2),
}


def write_inputs(row: Row, folder: Path, smollm2: Path | None) -> tuple[Path, Path]:
    """Write the row's model and prompts; returns the model folder and the prompt file."""
    if row.model != "smollm2":
        from grpo_step import write_inputs as write_random

        folder, data = folder.parent / row.model, folder.parent / row.model / "prompts.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        return (
            (folder / "model", data) if data.exists() else write_random(folder, row.model, row.prompts, row.prompt_len)
        )
    folder.mkdir(parents=True, exist_ok=True)
    if smollm2 is None:
        raise SystemExit("rows with SmolLM2 need its folder; pass --smollm2 DIR, or choose others with --rows")
    data, rng = folder / "prompts.jsonl", random.Random(0)
    with data.open("w") as file:
        for _ in range(4 * row.prompts):
            a, b = rng.randrange(10, 100), rng.randrange(10, 100)
            text = f"What is {a} plus {b}? Answer with the number only, without any explanation."
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}], "label": str(a + b)}) + "\n")
    return smollm2, data


def furlong_command(row: Row, model: Path, data: Path, out: Path, steps: int, extra: list[str]) -> list[str]:
    """Return the command line of furlong's side."""
    words = furlong_words(
        model,
        data,
        out,
        prompts=row.prompts,
        samples=SAMPLES,
        new=row.new,
        lr=LR,
        num_rollout=steps,
        num_epoch=steps,
        no_use_tensorboard=True,
        use_dynamic_batch_size=False,
        **({"apply_chat_template": True} if row.model == "smollm2" else {}),
    )
    return [sys.executable, "-m", "furlong", "train", *words, *extra]


def trl_worker(row: Row, model: Path, data: Path, result: Path, steps: int, *, vllm: bool) -> None:
    """Train with TRL, with transformers or vLLM, and append a line to `result` at the end of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    has_gpu = torch.cuda.is_available()
    generating: list[float] = []

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any) -> Any:
            began = time.perf_counter()
            answer = super()._generate(*args)
            generating.append(time.perf_counter() - began)
            return answer

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if has_gpu:
                torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30 if has_gpu else 0.0
            row = {"perf/rollout_time": sum(generating), "peak_gib": peak}
            generating.clear()
            with result.open("a") as file:
                file.write(json.dumps(row | {"perf/step_time": time.perf_counter() - self.began}) + "\n")

    config = trl_config(
        result.parent / "trl",
        samples=SAMPLES,
        new=row.new,
        lr=LR,
        max_steps=steps,
        bf16=has_gpu,
        use_cpu=not has_gpu,
        per_device_train_batch_size=row.trl_rows,
        gradient_accumulation_steps=row.prompts * SAMPLES // row.trl_rows,
        generation_batch_size=row.prompts * SAMPLES // (1 if vllm else row.trl_parts),
        **({"use_vllm": True, "vllm_mode": "colocate"} if vllm else {}),
    )
    rows = [{"prompt": json.loads(line)["prompt"]} for line in data.read_text().splitlines()]
    Timed(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16),
        reward_funcs=random_reward(),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Clock()],
    ).train()


def watch(command: list[str], marks_file: Path, log: Path, *, steps: int, timeout: float) -> dict[str, Any]:
    """Run `command` until its end or `timeout` seconds, and return when each line of `marks_file` appeared."""
    marks: list[float] = []
    began = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None and time.perf_counter() - began < timeout:
            time.sleep(POLL_S)
            lines = marks_file.read_bytes().count(b"\n") if marks_file.is_file() else 0
            marks += [time.perf_counter() - began] * (lines - len(marks))
            if len(marks) >= steps:
                break  # what follows (a last save, closing) is not timed
        ended = "timeout" if process.poll() is None and len(marks) < steps else process.poll()
        try:
            process.wait(timeout=20 if len(marks) >= steps else 0.1)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [json.loads(line) for line in marks_file.read_text().splitlines()] if marks_file.is_file() else []
    seconds = [after - before for before, after in itertools.pairwise([0.0, *marks])]
    first = 2 if len(seconds) >= 5 else 1
    result: dict[str, Any] = {"ended": ended, "step_s": [round(s, 3) for s in seconds]}
    if len(lines) == 1:
        seconds, first, result["is_first_step"] = [lines[0]["perf/step_time"]], 0, True
    if warm := seconds[first:]:
        result["median_s"] = round(statistics.median(warm), 3)
        split = [line["perf/rollout_time"] for line in lines[first:]]
        result["generate_s"] = round(statistics.median(split), 3)
    if len(marks) >= EARLY_STEP:
        result["to_step_10_s"] = round(marks[EARLY_STEP - 1], 2)
    names = ("peak_gib", "perf/train_time", "perf/actor_train_time", "perf/update_weights_time", "perf/tokens_per_s")
    result["last"] = {name: round(lines[-1][name], 3) for name in names if lines and name in lines[-1]}
    return result


def run_row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides of a row and print them."""
    row, out = ROWS[name], options.out.resolve()
    model, data = write_inputs(row, out / "inputs" / name, options.smollm2)
    answer: dict[str, Any] = {}
    for side in options.sides:
        steps = (side in TRL_SIDES and options.trl_steps) or options.steps or row.steps
        marks = out / f"{name}-{side}-{os.getpid()}" / "metrics.jsonl"
        if side not in TRL_SIDES:
            flags = [*(["--engine", "sglang"] if side == "sglang" else []), *options.furlong]
            command = furlong_command(row, model, data, marks.parent, steps, flags)
        else:
            marks.parent.mkdir(parents=True)
            command = [
                sys.executable,
                __file__,
                f"--{side}-worker",
                name,
                str(model),
                str(data),
                str(marks),
                str(steps),
            ]
        log = out / f"{name}-{side}.log"
        answer[side] = watch(command, marks, log, steps=steps, timeout=options.timeout)
        print(f"{name} {side}: {json.dumps(answer[side])}", flush=True)
        if answer[side]["ended"] not in (0, None):
            print("".join(f"    {line}\n" for line in log.read_text().splitlines()[-15:]), flush=True)
    return answer


def _ratio(answer: dict[str, Any], side: str) -> str:
    pair = [answer.get(each, {}).get("median_s") for each in (side, "furlong")]
    return str(round(pair[0] / pair[1], 2)) if all(pair) else "-"


def table(answers: dict[str, Any]) -> str:
    """Return the rows measured so far, in Markdown."""
    titles = [*(f"{side}, s a step (generation)" for side in SIDES), *(f"{side} / furlong" for side in TRL_SIDES)]
    lines = [f"| row | {' | '.join(titles)} |"]
    lines.append("|---" * (len(titles) + 1) + "|")
    for name, answer in answers.items():
        times = [answer.get(side, {}) for side in SIDES]
        cells = [
            f"{each['median_s']} ({each['generate_s']}){' first step' * ('is_first_step' in each)}"
            if "median_s" in each
            else str(each.get("ended", "-"))
            for each in times
        ]
        ratios = [_ratio(answer, side) for side in TRL_SIDES]
        lines.append(f"| {name} | {' | '.join([*cells, *ratios])} |")
    return "\n".join(lines)


# -- profile -------------------------------------------------------------------------------------------------------


def profile_row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Profile decode steps and a training step of a row."""
    row, out = ROWS[name], options.out.resolve()
    model, data = write_inputs(row, out / "inputs" / name, options.smollm2)
    answer: dict[str, Any] = {"decode": asyncio.run(profile_decode(row, model, out / f"{name}-decode-trace.json"))}
    report(f"{name}: {PROFILED_STEPS} decode steps", answer["decode"])
    folder = out / f"{name}-profile-{os.getpid()}"
    flags = ["--use-pytorch-profiler", "--profile-target", "train_overall"]
    flags += ["--profile-step-start", "3", "--profile-step-end", "4", *options.furlong]
    command = furlong_command(row, model, data, folder, 4, flags)
    answer["run"] = watch(command, folder / "metrics.jsonl", out / f"{name}-profile.log", steps=4, timeout=240)
    traces = sorted((folder / "profile").glob("train_overall*.json"))
    if not traces:
        print((out / f"{name}-profile.log").read_text()[-3000:], flush=True)
        return answer
    answer["train"] = summarize(traces[0])
    report(f"{name}: a training step", answer["train"])
    return answer


async def profile_decode(row: Row, model: Path, trace: Path) -> dict[str, Any]:
    """Time decode steps of the embedded engine, then profile `PROFILED_STEPS` of them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from furlong.inference.embedded import EmbeddedEngine
    from furlong.interfaces import SamplingParams

    has_gpu = torch.cuda.is_available()
    requests = row.prompts * SAMPLES
    engine = EmbeddedEngine(
        model,
        dtype=torch.bfloat16 if has_gpu else torch.float32,
        device="cuda" if has_gpu else "cpu",
        num_slots=requests,
        context_len=1024,
    )
    batch = engine._batch

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            batch._decode_step()
        if has_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    def measure() -> dict[str, Any]:
        batch.admit()
        steps(WARM_STEPS)
        timed = steps(PROFILED_STEPS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
        with profile(activities=activities) as recorded:
            steps(PROFILED_STEPS)
        recorded.export_chrome_trace(str(trace))
        batch.abort(lambda _: True)
        return {"slots": requests, "ms_per_step": round(1e3 * timed, 2)}

    await engine.pause("hold")
    params = SamplingParams(max_new_tokens=900, ignore_eos=True)
    prompts = [[3 + i % 90] * 45 for i in range(row.prompts)]
    waiting = [asyncio.ensure_future(engine.generate(p, params)) for p in prompts for _ in range(SAMPLES)]
    await asyncio.sleep(0.2)
    timed = await engine.execute(measure)
    await asyncio.gather(*waiting)
    await engine.close()
    return timed | summarize(trace)


def summarize(trace: Path) -> dict[str, Any]:
    """Return counts and times of a Chrome trace of the PyTorch profiler."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    by_kind: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for event in events:
        by_kind[event.get("cat", "")].append(event)
    kernels, runtime = by_kind["kernel"], by_kind["cuda_runtime"] + by_kind["cuda_driver"]
    spans = kernels or by_kind["cpu_op"]
    names = collections.Counter(event["name"] for event in runtime)
    return {
        "span_ms": round((max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans)) / 1e3, 2),
        "kernel_ms": round(sum(e["dur"] for e in kernels) / 1e3, 2),
        "kernels": len(kernels),
        "launches": sum(n for name, n in names.items() if "Launch" in name),
        "synchronizations": sum(names[name] for name in SYNCHRONIZATIONS),
        "copies": names["cudaMemcpyAsync"],
        "sync_ms": round(sum(e["dur"] for e in runtime if e["name"] in SYNCHRONIZATIONS) / 1e3, 2),
        "top_kernels": busiest(kernels),
        "top_operators": busiest(by_kind["cpu_op"]),
    }


def busiest(events: list[dict[str, Any]], count: int = 25) -> list[tuple[str, int, float]]:
    """Return name, number and total milliseconds of the events that take longest."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        times[event["name"][:90]].append(event["dur"] / 1e3)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:count]
    return [(name, len(values), round(sum(values), 3)) for name, values in ranked]


def report(title: str, summary: dict[str, Any]) -> None:
    """Print a summary of a trace."""
    tables = ("top_kernels", "top_operators")
    print(f"== {title}: {json.dumps({k: v for k, v in summary.items() if k not in tables})}")
    for table in tables:
        print(f"-- {table}: number, ms, name")
        for name, number, ms in summary[table]:
            print(f"{number:7d} {ms:10.3f}  {name}")
    sys.stdout.flush()


def main() -> None:
    """Run the rows and write one_gpu.json."""
    if sys.argv[1:2] in (["--trl-worker"], ["--trl-vllm-worker"]):
        side, name, model, data, result, steps = sys.argv[1:]
        trl_worker(ROWS[name], Path(model), Path(data), Path(result), int(steps), vllm="vllm" in side)
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and one_gpu.json")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=[name for name in ROWS if name != "tiny"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["furlong", "trl"])
    parser.add_argument("--steps", type=int, default=0, help="steps of each side (default: the row's)")
    parser.add_argument("--trl-steps", type=int, default=0, help="steps of TRL, where they differ")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a side; completed steps count")
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--profile", action="store_true", help="profile furlong instead of timing both sides")
    parser.add_argument("furlong", nargs="*", help="additional flags of `furlong train`, after `--`")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "one_gpu.json"
    answers = json.loads(path.read_text()) if path.is_file() else {}
    for name in options.rows:
        try:
            if options.profile:
                answers[f"{name}-profile"] = profile_row(name, options)
            else:
                answers[name] = answers.get(name, {}) | run_row(name, options)
        except Exception:  # noqa: BLE001  the other rows are measured
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
        path.write_text(json.dumps(answers, indent=1) + "\n")
    print(table({name: answer for name, answer in answers.items() if not name.endswith("-profile")}))


if __name__ == "__main__":
    main()
