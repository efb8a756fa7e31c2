"""Compare one step of on-policy distillation of furlong and TRL's DistillationTrainer.

    pip install trl==1.16.0
    python benchmarks/cpu/trl_distill.py

Policy and teacher are random models of one shape, and the loss is the mean over tokens of the reverse KL over the whole
vocabulary: `--opd-loss full` here, `beta=1` there. Both sides generate 4 prompts x 8 samples x exactly 32 new tokens,
run the teacher, and take one AdamW step. Rivals run in their own processes and step in turn, as in `trl_step.py`.

First TRL runs one step of SGD without clipping, and furlong repeats it on the same tokens: the weight updates are then
the gradients, which must agree to 1e-3 (relative L2 norm).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trl_step import (
    LR,
    NEW,
    PROMPTS,
    SAMPLES,
    CountingTrainer,
    Gate,
    GateTracker,
    answer,
    answer_of,
    build_run,
    initial_weights,
    quartiles,
    quiet,
    start,
    write_model,
    write_prompts,
)

UNCLIPPED = 1e9
FURLONG, TRL = "furlong", "TRL DistillationTrainer"


@dataclasses.dataclass(frozen=True)
class Task:
    """What both sides train: folders of policy and teacher, prompts, steps, and whether steps are those of SGD."""

    folder: Path
    teacher: Path
    prompts: Path
    steps: int
    threads: int
    is_sgd: bool = False


def build_furlong(task: Task, out: Path) -> Any:
    """Build the parts of a run as `furlong train` does."""
    optimizer = {"optimizer": "sgd", "lr": 1.0, "clip_grad": UNCLIPPED} if task.is_sgd else {"lr": LR}
    return build_run(
        task.folder,
        task.prompts,
        out,
        threads=task.threads,
        num_rollout=task.steps,
        fp32=True,
        use_opd=True,
        opd_type="trainer",
        opd_loss="full",
        opd_teacher_load=task.teacher,
        opd_task_reward_coef=0,
        calculate_per_token_loss=True,
        **optimizer,
    )


def run_furlong(channel: Connection, task: Task, out: Path) -> None:
    """Train with furlong, pausing before every step."""
    quiet(out)
    built = build_furlong(task, out)
    from furlong.loop.train import train

    gate = Gate(channel)
    trackers = [*built.parts.trackers, GateTracker(gate)]
    parts = dataclasses.replace(built.parts, trainer=CountingTrainer(built.parts.trainer, gate), trackers=trackers)

    async def everything() -> None:
        await train(parts, built.schedule, built.checkpoints)
        await built.close()

    asyncio.run(everything())


def trl_trainer(task: Task, out: Path, gate: Gate | None) -> Any:
    """Return TRL's trainer; each prompt is in a batch once for each of its samples."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    torch.set_num_threads(task.threads)

    class Counting(DistillationTrainer):
        def _generate(self, *args: Any) -> Any:
            began = time.perf_counter()
            result = super()._generate(*args)
            if gate is not None:
                gate.work["generate"] = time.perf_counter() - began
            return result

        def _compute_loss(self, *args: Any) -> Any:
            self.seen = args[1]
            mask = self.seen["completion_mask"]
            if gate is not None:
                gate.work |= {"samples": len(mask), "shortest": int(mask.sum(1).min()), "trained": int(mask.sum())}
            return super()._compute_loss(*args)

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if gate is not None:
                gate.stop()

    rows = [json.loads(line) for line in task.prompts.read_text().splitlines() for _ in range(SAMPLES)]
    optimizer = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": UNCLIPPED} if task.is_sgd else {
        "learning_rate": LR, "max_grad_norm": 1.0
    }  # fmt: skip
    return Counting(
        model=AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(task.teacher, dtype=torch.float32),
        args=DistillationConfig(
            output_dir=str(out),
            beta=1.0,
            max_completion_length=NEW,
            max_steps=task.steps,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
            **optimizer,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(task.folder),
        callbacks=[Stop()],
    )


def run_trl(channel: Connection, task: Task, out: Path) -> None:
    """Train with TRL, pausing before every step."""
    quiet(out)
    trl_trainer(task, out, Gate(channel)).train()


def check_trl(channel: Connection, task: Task, out: Path) -> None:
    """Run one TRL step of SGD; send its samples and the updated weights."""
    quiet(out)
    trainer = trl_trainer(task, out, None)
    trainer.train()
    samples = zip(trainer.seen["prompt_ids"].tolist(), trainer.seen["completion_ids"].tolist(), strict=True)
    weights = {name: p.detach().flatten().tolist() for name, p in trainer.model.named_parameters()}
    channel.send({"samples": sorted(samples), "weights": weights})


def check_furlong(channel: Connection, task: Task, out: Path, seen: dict[str, Any]) -> None:
    """Run furlong's step of SGD on the tokens of TRL's step; send the updated weights."""
    quiet(out)
    built = build_furlong(task, out)
    from furlong.core.sample import Group, Sample, Status
    from furlong.rollout.train_batch import Conversion, batch_from_groups

    samples = [
        Sample(group_index=i // SAMPLES, index=i, tokens=prompt + new, response_length=len(new), reward=0.0,
               status=Status.TRUNCATED)
        for i, (prompt, new) in enumerate(seen["samples"])
    ]  # fmt: skip
    groups = [Group(g, samples[g * SAMPLES : (g + 1) * SAMPLES]) for g in range(PROMPTS)]
    worker = built.parts.trainer.worker
    batch = batch_from_groups(0, groups, Conversion(algo=worker.algo))

    async def step() -> None:
        await built.parts.trainer.train(batch)
        await built.close()

    asyncio.run(step())
    channel.send({name: tensor.flatten().tolist() for name, tensor in worker.backend.named_weights()})


def check(task: Task, scratch: Path) -> None:
    """Compare the first gradients on the same tokens. Raise SystemExit if they differ."""
    theirs = answer(check_trl, task, scratch / "check-trl")
    ours = answer(check_furlong, task, scratch / "check-furlong", theirs)
    before = answer(initial_weights, task.folder)
    apart = moved = 0.0
    for name, values in ours.items():
        apart += sum((a - b) ** 2 for a, b in zip(values, theirs["weights"][name], strict=True))
        moved += sum((a - b) ** 2 for a, b in zip(values, before[name], strict=True))
    share = math.sqrt(apart / moved)
    print(f"first gradient on the same tokens: norm {math.sqrt(moved):.5f}; the two differ by {share:.1e} of it")
    if not share < 1e-3:
        raise SystemExit("furlong and TRL compute different gradients, so their times are not comparable")


def measure(task: Task, scratch: Path, *, warmup: int) -> dict[str, list[dict[str, Any]]]:
    """Step both in turn. Return the times and counts of each timed step."""
    os.environ["OMP_NUM_THREADS"] = str(task.threads)
    taken: dict[str, list[dict[str, Any]]] = {FURLONG: [], TRL: []}
    running: dict[str, tuple[Any, Connection, Path]] = {}
    for name, target in ((FURLONG, run_furlong), (TRL, run_trl)):
        out = scratch / name.split()[0]
        running[name] = (*start(target, task, out), out)
        answer_of(running[name][1], out)
    for i in range(task.steps - 1):
        for name in list(taken)[:: 1 if i % 2 else -1]:
            _, channel, out = running[name]
            channel.send(None)
            result = answer_of(channel, out)
            if i >= warmup:
                taken[name].append(result)
    for process, channel, _ in running.values():
        channel.send(None)
        process.join()
    return taken


def main() -> None:
    """Check that both sides compute the same gradient, then print their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="3m", choices=["tiny", "3m", "12m"])
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[16, 64], help="prompt lengths in tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    args = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder, teacher = (write_model(args.model, root / f"model-{seed}", seed=seed) for seed in (0, 1))
        for length in args.prompt_len:
            prompts = write_prompts(root / f"prompts-{length}.jsonl", PROMPTS, length)
            scratch = root / str(length)
            task = Task(folder, teacher, prompts, args.warmup + args.steps + 1, args.threads)
            print(f"{args.model}, prompts of {length} tokens, {args.threads} threads", flush=True)
            check(dataclasses.replace(task, steps=1, is_sgd=True), scratch)
            taken = measure(task, scratch, warmup=args.warmup)
            for side, steps in taken.items():
                assert {step["trained"] for step in steps} == {PROMPTS * SAMPLES * NEW}
                low, middle, high = quartiles([step["wall"] for step in steps])
                cpu, generate = (statistics.median(step[key] for step in steps) for key in ("cpu", "generate"))
                print(f"  {side:<24}{middle * 1e3:8.1f} ms ({low * 1e3:.0f}-{high * 1e3:.0f}), CPU {cpu * 1e3:.1f} ms, "
                      f"generation {generate / middle:.0%}")  # fmt: skip
            low, middle, high = quartiles(
                [b["wall"] / a["wall"] for a, b in zip(taken[FURLONG], taken[TRL], strict=True)]
            )
            by_cpu = statistics.median(b["cpu"] / a["cpu"] for a, b in zip(taken[FURLONG], taken[TRL], strict=True))
            print(
                f"  TRL takes {middle:.2f} times as long ({low:.2f}-{high:.2f}), {by_cpu:.2f} by CPU time", flush=True
            )


if __name__ == "__main__":
    main()
