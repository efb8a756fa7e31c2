"""Measure the time from process start to the end of the first training step, and peak memory of a small run.

    pip install trl==1.16.0
    python benchmarks/cpu/startup.py [--rivals floor furlong TRL]

furlong and TRL train the same random model of one million parameters on 4 prompts x 8 samples x 8 new tokens, in turn,
each time in a new process. TRL is skipped if it is not installed. This script measures the time from launching the
process to the end of the first step (furlong: the first line of metrics.jsonl; TRL: a callback after the optimizer
step). CPU seconds cover the process and its children until they exit. `floor` only imports torch and transformers'
model code, which both need. One untimed run of each fills the disk cache first.

Peak memory is the maximum resident set size of a run with the quickstart's shape (64 prompts x 8 samples x 8 tokens,
two evaluations of 300 problems), synchronous and asynchronous.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPTS, SAMPLES, NEW = 4, 8, 8
RIVALS = ("floor", "furlong", "TRL")

FLOOR = """
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from pathlib import Path
Path({marker!r}).write_text('done')
"""

TRL = """
from pathlib import Path
import torch
torch.set_num_threads(1)
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

class Mark(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        Path({marker!r}).write_text('done')

rewards = [float(i % 3 == 0) for i in range({prompts} * {samples})]
GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.float32),
    reward_funcs=lambda completions, **kwargs: rewards,
    args=GRPOConfig(
        output_dir={out!r}, use_cpu=True, bf16=False, per_device_train_batch_size={prompts} * {samples},
        num_generations={samples}, max_completion_length={new}, max_steps=1, learning_rate=1e-4, beta=0.0,
        loss_type="grpo", gradient_checkpointing=False, dataloader_pin_memory=False, save_strategy="no",
        report_to="none", disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list([{{"prompt": f"{{i}}+1="}} for i in range(64)]),
    processing_class=AutoTokenizer.from_pretrained({model!r}),
    callbacks=[Mark()],
).train()
"""


def furlong_command(model: Path, data: Path, out: Path, **flags: object) -> list[str]:
    """Return the `furlong train` command with the benchmark's settings; `flags` override them."""
    settings: dict[str, object] = {
        "hf_checkpoint": model,
        "prompt_data": data,
        "input_key": "prompt",
        "label_key": "label",
        "rm_type": "math",
        "num_rollout": 1,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES,
        "rollout_max_response_len": NEW,
        "use_dynamic_batch_size": None,
        "max_tokens_per_gpu": 8192,
        "num_threads": 1,
        "output_dir": out,
        **flags,
    }
    words = [
        w for k, v in settings.items() for w in (f"--{k.replace('_', '-')}", *([] if v is None else str(v).split()))
    ]
    return [sys.executable, "-m", "furlong", "train", *words]


def seconds_until(command: list[str], log: Path, record: Path) -> tuple[float, float]:
    """Return the wall seconds until the file `record` has content, and the CPU seconds until the command exits."""
    with log.open("wb") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output)
        while not (record.exists() and record.stat().st_size):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                raise SystemExit(f"{command[:4]} failed:\n{log.read_text()[-3000:]}")
            time.sleep(0.002)
        seconds = time.perf_counter() - start
        _, process.returncode, usage = os.wait4(process.pid, 0)
    return seconds, usage.ru_utime + usage.ru_stime


def peak_mb(command: list[str], log: Path) -> float:
    """Run a command and return its maximum resident set size in MB."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[:4]} failed:\n{log.read_text()[-3000:]}")
    return usage.ru_maxrss / 1024


def first_steps(
    rivals: list[str], model: Path, data: Path, scratch: Path, reps: int
) -> dict[str, list[tuple[float, float]]]:
    """Time the rivals in turn. The first round is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    for i in range(reps + 1):
        out, marker, floor = scratch / f"run{i}", scratch / f"marker{i}", scratch / f"floor{i}"
        script = TRL.format(
            marker=str(marker),
            out=str(scratch / f"trl{i}"),
            model=str(model),
            prompts=PROMPTS,
            samples=SAMPLES,
            new=NEW,
        )
        commands = {
            "floor": ([sys.executable, "-c", FLOOR.format(marker=str(floor))], floor),
            "furlong": (furlong_command(model, data, out), out / "metrics.jsonl"),
            "TRL": ([sys.executable, "-c", script], marker),
        }
        for name in rivals:
            command, record = commands[name]
            seconds = seconds_until(command, scratch / "log", record)
            if i:
                times[name].append(seconds)
    return times


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5, help="timed starts per rival")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, help="default: all that are installed")
    args = parser.parse_args()
    has_trl = importlib.util.find_spec("trl") is not None
    if args.rivals is None and not has_trl:
        print("skipping TRL: not installed (pip install trl==1.16.0)")
    rivals = args.rivals or [name for name in RIVALS if name != "TRL" or has_trl]
    if "furlong" not in rivals:
        parser.error("--rivals must include furlong, the reference for the ratios")
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    from furlong.models.presets import write_preset
    from furlong.quickstart import addition as task

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = write_preset("tiny", scratch / "tiny", seed=0)
        data, held_out = scratch / "problems.jsonl", scratch / "held_out.jsonl"
        task.write_prompts(data, task.problems(64 * 6, seed=0))
        task.write_prompts(held_out, task.held_out_problems())
        times = first_steps(rivals, model, data, scratch, args.reps)
        own = times["furlong"]
        print("process start to the end of the first step")
        print(f"{'':<10}{'median s':>9}  {'range':<14} CPU s, range          x furlong in the same round: wall, CPU")
        for name, pairs in times.items():
            columns, ratios = list(zip(*pairs, strict=True)), list[list[float]]()
            for values, other in zip(columns, zip(*own, strict=True), strict=True):
                ratios.append([v / o for v, o in zip(values, other, strict=True)])
            cells = [f"{statistics.median(values):9.2f}  {min(values):.2f} - {max(values):.2f}" for values in columns]
            cells += [f"{statistics.median(each):.2f} ({min(each):.2f} - {max(each):.2f})" for each in ratios]
            print(f"{name:<10}" + "   ".join(cells))
        print("peak resident memory of a run with the quickstart's shape")
        for kind, flags in (("sync", {}), ("async", {"async_buffer_size": 1})):
            command = furlong_command(
                model, data, scratch / kind, num_rollout=6, rollout_batch_size=64, eval_interval=3,
                eval_prompt_data=f"held_out {held_out}", **flags,
            )  # fmt: skip
            print(f"{kind:<10}{peak_mb(command, scratch / 'log'):9.0f} MB")


if __name__ == "__main__":
    main()
