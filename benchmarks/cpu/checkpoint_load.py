"""Measure what comparing checksums adds to the time that loading a checkpoint takes.

    python benchmarks/cpu/checkpoint_load.py

A trainer checkpoint (float32 weights and Adam's two moments) is loaded into the trainer, alternately with its manifest
and with one of the older format, which has sizes only. Each load is the first one of its process, as in a resumed run.
The files are in the page cache, so the disk hides nothing; with --cold they are dropped from it before each load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from furlong.config.command_line import Resolved, load
from furlong.core.checkpoint_folder import MANIFEST, read_manifest, write_manifest
from furlong.core.file_manifest import manifest_text
from furlong.interfaces import Trainer
from furlong.models.presets import write_preset
from furlong.wiring.build import build

FORK = multiprocessing.get_context("fork")


def write_model(folder: Path, hidden: int, layers: int) -> int:
    """Write a random model with the preset's tokenizer; return its number of parameters."""
    write_preset("tiny", folder, seed=0)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    config = Qwen2Config(vocab_size=vocabulary, num_attention_heads=8, num_key_value_heads=8, **sizes)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def drop_from_cache(folder: Path) -> None:
    """Drop the files of a folder from the page cache, so that the next load reads the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flags_of(folder: Path) -> Resolved:
    """Return the command of a run with the model of `folder`."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n' * 4)
    words = ["--hf-checkpoint", folder / "model", "--prompt-data", prompts, "--label-key", "label", "--rm-type", "math"]
    words += ["--num-rollout", 1, "--rollout-batch-size", 1, "--n-samples-per-prompt", 2, "--num-threads", 1]
    return load([str(word) for word in words])


async def with_trainer(folder: Path, use: Callable[[Trainer], Awaitable[float]]) -> float:
    """Build a run, call `use` with its trainer, and return what that returns."""
    (folder / "run").mkdir(exist_ok=True)
    built = build(flags_of(folder), folder / "run")
    try:
        return await use(built.parts.trainer)
    finally:
        await built.close()
        built.close_files()


def in_new_process(folder: Path, use: Callable[[Trainer], Awaitable[float]]) -> float:
    """Do that in a process of its own, whose memory has not been used before, as that of a resumed run."""
    answers = FORK.SimpleQueue()
    process = FORK.Process(target=lambda: answers.put(asyncio.run(with_trainer(folder, use))))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"a process ended with exit code {process.exitcode}")
    return answers.get()


async def save(trainer: Trainer, folder: Path) -> float:
    """Write the checkpoint."""
    folder.mkdir(parents=True)
    await trainer.save(folder)
    return 0.0


async def timed_load(trainer: Trainer, folder: Path) -> float:
    """Return the seconds of a load."""
    started = time.perf_counter()
    await trainer.load(folder)
    return time.perf_counter() - started


def measure(folder: Path, rounds: int, *, is_cold: bool) -> tuple[list[float], list[float], int]:
    """Return seconds of each load with and without checksums, and the bytes of the checkpoint."""
    checkpoint = folder / "save" / "iter_0000001"
    trainer = checkpoint / "trainer"
    in_new_process(folder, partial(save, folder=trainer))
    write_manifest(checkpoint, 1)
    records = read_manifest(checkpoint)
    sizes = {name: record.num_bytes for name, record in records.items()}
    manifests = {
        "with": manifest_text(1, records),
        "without": json.dumps({"format": 1, "step": 1, "files": sizes}),
    }
    times: dict[str, list[float]] = {kind: [] for kind in manifests}
    for number in range(rounds):
        for kind in ("with", "without")[:: 1 if number % 2 else -1]:
            (checkpoint / MANIFEST).write_text(manifests[kind])
            if is_cold:
                drop_from_cache(checkpoint)
            times[kind].append(in_new_process(folder, partial(timed_load, folder=trainer)))
    return times["with"], times["without"], sum(sizes.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model")
    parser.add_argument("--rounds", type=int, default=9, help="loads of each kind")
    parser.add_argument("--cold", action="store_true", help="read the files from the disk, not from the page cache")
    args = parser.parse_args()
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_model(folder / "model", args.hidden, args.layers)
        checked, plain, size = measure(folder, args.rounds, is_cold=args.cold)
    print(f"{parameters / 1e6:.0f}M parameters, {size / 1e6:.0f} MB, {args.rounds} loads of each kind")
    pairs = statistics.median(one / other for one, other in zip(checked, plain, strict=True))
    for name, of in (("medians", statistics.median), ("shortest", min)):
        one, other = of(checked), of(plain)
        print(f"{name}: with checksums {one * 1e3:.1f} ms, without {other * 1e3:.1f} ms, ratio {one / other:.3f}")
    print(f"median ratio of consecutive loads: {pairs:.3f}")


if __name__ == "__main__":
    main()
