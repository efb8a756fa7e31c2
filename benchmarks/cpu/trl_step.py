"""Compare one GRPO step of furlong and TRL's GRPOTrainer on the same model, prompts and settings.

    pip install trl==1.16.0
    python benchmarks/cpu/trl_step.py

Each rival runs in its own process and waits for a signal before every step. Their steps therefore alternate, and slow
changes in machine load affect all of them equally. A step is everything between two signals: generation, reward, loss,
backward pass, optimizer step, weight update and logging. Both sides use 4 prompts of equal length with 8 samples each,
exactly 32 new tokens per sample (the end-of-sequence token is outside the model's vocabulary), a random reward, GRPO
without KL, one AdamW step per rollout, and the whole rollout as one batch.

Before timing, TRL runs one step and furlong repeats it with the same tokens and rewards. Loss, gradient norm and the
updated weights must agree (`--no-check` skips this).

Columns: wall time per step (median and quartiles); CPU time of the process per step, which depends less on other load;
`gen`, the share of generation; `x fp32`, the rival's wall time divided by that of `furlong fp32` in the same round
(median and quartiles); `x cpu`, the same for CPU time; `x bf16`, the ratios to `furlong bf16`. Prompt length matters
because furlong computes a prompt once for its 8 samples, both in generation and in training.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trl_rival import furlong_words, random_reward, trl_config

PROMPTS, SAMPLES, NEW = 4, 8, 32
LR = 1e-4
NEVER = "<|never|>"  # the end-of-sequence token; its id is outside the model's vocabulary

RIVALS = {
    "furlong fp32": ("furlong", "fp32"),
    "furlong bf16": ("furlong", "bf16"),
    "TRL fp32": ("trl", "fp32"),
    "TRL bf16 autocast": ("trl", "bf16"),
    "TRL bf16 weights": ("trl", "bf16-weights"),
}


def write_model(preset: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a random model that cannot sample its end-of-sequence token."""
    from furlong.models.presets import write_preset
    from furlong.models.tokenizer import build_tokenizer

    write_preset(preset, folder, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = build_tokenizer()
    while len(tokenizer) < config["vocab_size"]:
        tokenizer.add_tokens([f"<|spare{len(tokenizer)}|>"])
    tokenizer.add_special_tokens({"eos_token": NEVER})
    assert tokenizer.eos_token_id >= config["vocab_size"]
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": tokenizer.eos_token_id}))
    return folder


def write_prompts(path: Path, count: int, length: int) -> Path:
    """Write `count` distinct prompts of `length` characters, one token per character."""
    prompts = [f"{i} of {count} ".ljust(length, "x")[:length] for i in range(count)]
    path.write_text("".join(json.dumps({"prompt": p, "label": "0"}) + "\n" for p in prompts))
    return path


class Gate:
    """Pauses between steps: reports the last step and waits for the signal to continue."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self.work: dict[str, Any] = {}
        self._wall = self._cpu = 0.0

    def stop(self) -> None:
        """Stop the clock, report the step, wait for the signal, and restart the clock."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self._channel.send({"wall": wall, "cpu": cpu, **self.work})
        self.work = {}
        self._channel.recv()
        self._wall, self._cpu = time.perf_counter(), time.process_time()


def build_run(folder: Path, prompts: Path, out: Path, *, threads: int, **more: Any) -> Any:
    """Build the parts of a run as `furlong train` does; `more` are flags."""
    from furlong.config.command_line import load
    from furlong.core.garbage import import_without_gc, raise_gc_threshold
    from furlong.machine import choose_threads, set_threads
    from furlong.run.folder import run_folder

    sizes = {"prompts": PROMPTS, "samples": SAMPLES, "new": NEW, "lr": LR}
    flags = {"max_tokens_per_gpu": 65536, "num_threads": threads}
    resolved = load(furlong_words(folder, prompts, out, **sizes | flags | more))
    raise_gc_threshold(resolved.config.data.rollout_batch_size * resolved.config.data.n_samples_per_prompt)
    with import_without_gc("furlong.wiring.build"):
        set_threads(choose_threads(threads, num_parts=1))
        from furlong.wiring.build import build
    return build(resolved, run_folder(resolved))


class CountingTrainer:
    """Wraps the trainer and counts its samples and tokens."""

    def __init__(self, trainer: Any, gate: Gate) -> None:
        self._trainer, self._gate = trainer, gate

    async def train(self, batch: Any) -> Any:
        """Count the batch and train on it."""
        lengths = batch.response_lengths
        self._gate.work |= {
            "samples": len(lengths),
            "generated": int(lengths.sum()),
            "shortest": int(lengths.min()),
            "trained": int(batch.loss_masks.sum()),
        }
        return await self._trainer.train(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class GateTracker:
    """A tracker that pauses at the end of every step."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def log(self, step: int, metrics: dict[str, float]) -> None:  # noqa: ARG002  the port's signature
        """Record the generation time and pause."""
        self._gate.work["generate"] = metrics["perf/rollout_time"]
        self._gate.stop()

    def close(self) -> None:
        """Do nothing."""


def build_furlong(folder: Path, prompts: Path, out: Path, *, threads: int, dtype: str, rounds: int) -> Any:
    """Build the parts of a GRPO run."""
    return build_run(folder, prompts, out, threads=threads, num_rollout=rounds, **{dtype: True})


def run_furlong(channel: Connection, folder: Path, prompts: Path, out: Path, threads: int, dtype: str, n: int) -> None:
    """Train with furlong, pausing before every step."""
    quiet(out)
    built = build_furlong(folder, prompts, out, threads=threads, dtype=dtype, rounds=n)
    from furlong.loop.train import train

    gate = Gate(channel)
    parts = dataclasses.replace(
        built.parts,
        trainer=CountingTrainer(built.parts.trainer, gate),
        trackers=[*built.parts.trackers, GateTracker(gate)],
    )

    async def everything() -> None:
        await train(parts, built.schedule, built.checkpoints)
        await built.close()

    asyncio.run(everything())


def trl_trainer(folder: Path, prompts: Path, out: Path, *, dtype: str, max_steps: int, gate: Gate | None) -> Any:
    """Return TRL's trainer with every optional cost disabled that furlong does not have."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    class Counting(GRPOTrainer):
        def _generate(self, *args: Any) -> Any:
            began = time.perf_counter()
            result = super()._generate(*args)
            if gate is not None:
                gate.work["generate"] = time.perf_counter() - began
            return result

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            mask = inputs["completion_mask"]
            if gate is not None:
                gate.work |= {
                    "samples": len(mask),
                    "generated": mask.numel(),
                    "shortest": int(mask.sum(1).min()),
                    "trained": int(mask.sum()),
                }
            self.seen = inputs
            return super()._compute_loss(model, inputs)

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if gate is not None:
                gate.stop()

    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    weights = torch.bfloat16 if dtype == "bf16-weights" else torch.float32
    return Counting(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=weights),
        reward_funcs=random_reward(),
        args=trl_config(
            out,
            samples=SAMPLES,
            new=NEW,
            lr=LR,
            max_steps=max_steps,
            use_cpu=True,
            bf16=dtype != "fp32",
            per_device_train_batch_size=PROMPTS * SAMPLES,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[Stop()],
    )


def run_trl(channel: Connection, folder: Path, prompts: Path, out: Path, threads: int, dtype: str, n: int) -> None:
    """Train with TRL, pausing before every step."""
    quiet(out)
    import torch

    torch.set_num_threads(threads)
    trl_trainer(folder, prompts, out, dtype=dtype, max_steps=n, gate=Gate(channel)).train()


def check_trl(channel: Connection, folder: Path, prompts: Path, out: Path) -> None:
    """Run one TRL step. Send its samples, loss, gradient norm and updated weights."""
    quiet(out)
    trainer = trl_trainer(folder, prompts, out, dtype="fp32", max_steps=1, gate=None)
    trainer.train()
    seen = trainer.seen
    # TRL shuffles the samples of a rollout. Rewards are 0 or 1, so the sign of the advantage determines the reward.
    columns = (seen["prompt_ids"].tolist(), seen["completion_ids"].tolist(), seen["advantages"].tolist())
    channel.send(
        {
            "samples": sorted(zip(*columns, strict=True)),
            "loss": trainer.state.log_history[0]["loss"],
            "grad_norm": trainer.state.log_history[0]["grad_norm"],
            "weights": {name: p.detach().flatten().tolist() for name, p in trainer.model.named_parameters()},
        }
    )


def check_furlong(channel: Connection, folder: Path, prompts: Path, out: Path, seen: dict[str, Any]) -> None:
    """Run furlong's step on the tokens and rewards of TRL's step."""
    quiet(out)
    built = build_furlong(folder, prompts, out, threads=1, dtype="fp32", rounds=1)
    from furlong.config.sections import RolloutFlags
    from furlong.core.sample import Group, Sample, Status
    from furlong.rollout.train_batch import Conversion, batch_from_groups

    groups: list[Group] = []
    for g in range(PROMPTS):
        samples: list[Sample] = []
        for i in range(g * SAMPLES, (g + 1) * SAMPLES):
            prompt, completion, advantage = seen["samples"][i]
            sample = Sample(group_index=g, index=i, tokens=prompt + completion, response_length=len(completion))
            sample.reward, sample.status = float(advantage > 0), Status.TRUNCATED
            samples.append(sample)
        groups.append(Group(g, samples))
    settings = built.parts.trainer.worker.algo
    batch = batch_from_groups(0, groups, Conversion(algo=settings, rollout=RolloutFlags(rollout_max_response_len=NEW)))

    async def step() -> dict[str, float]:
        metrics = await built.parts.trainer.train(batch)
        result = {name: metric.value for name, metric in metrics.items()}
        await built.close()
        return result

    metrics = asyncio.run(step())
    weights = {name: tensor.flatten().tolist() for name, tensor in built.parts.trainer.worker.backend.named_weights()}
    channel.send({"loss": metrics["train/loss"], "grad_norm": metrics["train/grad_norm"], "weights": weights})


def check(folder: Path, prompts: Path, scratch: Path) -> None:
    """Compare one step of both on the same tokens. Raise SystemExit if they differ."""
    theirs = answer(check_trl, folder, prompts, scratch / "check-trl")
    ours = answer(check_furlong, folder, prompts, scratch / "check-furlong", theirs)
    before = answer(initial_weights, folder)
    apart = moved = 0.0
    for name, values in ours["weights"].items():
        apart += sum((a - b) ** 2 for a, b in zip(values, theirs["weights"][name], strict=True))
        moved += sum((a - b) ** 2 for a, b in zip(values, before[name], strict=True))
    norm, rival_norm, share = ours["grad_norm"], theirs["grad_norm"], math.sqrt(apart / moved)
    print(
        f"furlong and TRL on the same tokens: loss {ours['loss']:.1e} and {theirs['loss']:.1e}, gradient norm "
        f"{norm:.5f} and {rival_norm:.5f}; the weight updates differ by {share:.2%} (relative L2 norm)"
    )
    # TRL divides rewards by their standard deviation + 1e-4, furlong by standard deviation + 1e-6. Adam's first step is
    # close to the sign of the gradient, so rounding flips it where the gradient is almost 0.
    if abs(norm - rival_norm) > 1e-3 * rival_norm or share > 0.05 or abs(ours["loss"] - theirs["loss"]) > 1e-4:
        raise SystemExit("furlong and TRL compute different steps, so their times are not comparable")


def initial_weights(channel: Connection, folder: Path) -> None:
    """Send the weights in the folder."""
    from safetensors.torch import load_file

    channel.send({name: t.flatten().tolist() for name, t in load_file(folder / "model.safetensors").items()})


def quiet(out: Path) -> None:
    """Redirect a rival's output to a file, so that the terminal shows only the table."""
    out.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    file = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def start(target: Any, *args: Any) -> tuple[Any, Connection]:
    """Run `target` in a new process. Return the process and the channel to it."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def answer_of(channel: Connection, out: Path) -> Any:
    """Wait for a rival's message. Raise SystemExit with the end of its log if it has exited."""
    try:
        return channel.recv()
    except EOFError:
        raise SystemExit(f"a rival exited:\n{out.with_suffix('.log').read_text()[-3000:]}") from None


def answer(target: Any, *args: Any) -> Any:
    """Run `target` in a new process until it sends one message; return that."""
    process, channel = start(target, *args)
    received = channel.recv()
    process.join()
    return received


def measure(
    names: list[str], folder: Path, prompts: Path, scratch: Path, *, threads: int, warmup: int, steps: int
) -> dict[str, list[dict[str, Any]]]:
    """Step the rivals in turn. Return the times and counts of each timed step."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    run = {"furlong": run_furlong, "trl": run_trl}
    channels: dict[str, Connection] = {}
    outs: dict[str, Path] = {}
    processes: list[Any] = []
    total = warmup + steps + 1
    for name in names:
        which, dtype = RIVALS[name]
        out = scratch / f"{folder.name}-{prompts.stem}-{threads}-{name.replace(' ', '-')}"
        process, channel = start(run[which], folder, prompts, out, threads, dtype, total)
        processes.append(process)
        channels[name], outs[name] = channel, out
        answer_of(channel, out)  # loaded and paused before its first step (furlong: after its first step)
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for i in range(warmup + steps):
        for name in names if i % 2 else names[::-1]:
            channels[name].send(None)
            result = answer_of(channels[name], outs[name])
            if i >= warmup:
                taken[name].append(result)
    for name, process in zip(names, processes, strict=True):
        channels[name].send(None)
        process.join()
    return taken


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def report(taken: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Print one row per rival: its times and their ratios to each furlong row."""
    own = [name for name in taken if RIVALS[name][0] == "furlong"]
    for name, steps in taken.items():
        low, middle, high = quartiles([s["wall"] for s in steps])
        cpu, generate = (statistics.median(s[key] for s in steps) for key in ("cpu", "generate"))
        work = {(s["samples"], s["generated"], s["shortest"], s["trained"]) for s in steps}
        assert work == {(PROMPTS * SAMPLES, PROMPTS * SAMPLES * NEW, NEW, PROMPTS * SAMPLES * NEW)}, work
        ratios: list[str] = []
        for mine in own if name not in own else []:
            a, b, c = quartiles([s["wall"] / o["wall"] for s, o in zip(steps, taken[mine], strict=True)])
            by_cpu = cpu / statistics.median(o["cpu"] for o in taken[mine])
            ratios.append(f"{b:5.2f} ({a:.2f}-{c:.2f}) {by_cpu:5.2f}")
        print(
            f"{title}  {name:<18}{middle * 1e3:8.1f} ({low * 1e3:5.0f} -{high * 1e3:5.0f}){cpu * 1e3:9.1f}"
            f"{generate / middle:6.0%}  {'  '.join(ratios)}",
            flush=True,
        )
    print(f"{' ' * len(title)}  every step of every rival: {PROMPTS * SAMPLES * NEW} tokens generated and trained on")


def main() -> None:
    """Check that both sides compute the same step, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["3m", "12m"], choices=["tiny", "3m", "12m"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[16, 64, 256], help="prompt lengths in tokens")
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument("--warmup", type=int, default=2, help="untimed warm-up steps")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per rival")
    parser.add_argument("--no-check", action="store_true", help="skip the check that both sides compute the same step")
    args = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        count = PROMPTS * (args.warmup + args.steps + 1)
        own = [name for name in args.rivals if RIVALS[name][0] == "furlong"]
        heads = [f"x {name.split()[1]} (quartiles)  x cpu" for name in own]
        print("model prompt threads  rival                wall ms  quartiles     cpu ms   gen  " + "  ".join(heads))
        for size in args.models:
            folder = write_model(size, scratch / size)
            for length in args.prompt_len:
                prompts = write_prompts(scratch / f"prompts{length}.jsonl", count, length)
                if not args.no_check:
                    check(folder, prompts, scratch / f"{size}-{length}")
                for threads in args.threads:
                    kwargs = {"threads": threads, "warmup": args.warmup, "steps": args.steps}
                    taken = measure(args.rivals, folder, prompts, scratch, **kwargs)
                    report(taken, f"{size:>5} {length:>6} {threads:>7}")


if __name__ == "__main__":
    main()
