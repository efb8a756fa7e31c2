"""Measure what comparing checksums adds to the time that loading a checkpoint, and a whole resume, takes.

    python benchmarks/cpu/checkpoint_load.py

A run of one step saves a checkpoint (float32 weights and Adam's two moments). It is loaded into a trainer that is
built, and a run is resumed from it: everything from the flags to a trainer, an engine and data that are in place, as in
`furlong train --load`. Both are measured in turn with checksums and without: the manifest then is one of the older
format, which has sizes only, and a resumed run does not compare its data, base weights and tokenizer either. Each load
is the first one of its process, as in a resumed run. Loads of two processes differ by more than
checksums cost, so the time that comparing takes is measured inside each load, too. The files are in the page cache, so
the disk hides nothing; with --cold they are dropped from it before each load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest import mock

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from furlong.config.command_line import Resolved, load
from furlong.files.checkpoint_folder import MANIFEST, read_manifest
from furlong.files.file_manifest import manifest_text
from furlong.files.run_inputs import RunInputs
from furlong.files.verified_tensors import TensorFile
from furlong.models.presets import write_preset
from furlong.run.launch import run
from furlong.wiring.build import Built, build

T = TypeVar("T")
Times = dict[str, dict[bool, list[tuple[float, float]]]]  # seconds, and those of comparing blocks
NAME = "iter_0000001"
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


def flags_of(folder: Path, *more: object) -> Resolved:
    """Return the command of a run with the model of `folder`."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n' * 4)
    words = ["--hf-checkpoint", folder / "model", "--prompt-data", prompts, "--label-key", "label", "--rm-type", "math"]
    words += ["--rollout-batch-size", 1, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 8]
    words += ["--num-threads", 1, "--output-dir", folder / "run", *more]
    return load([str(word) for word in words])


def in_new_process(work: Callable[[], T]) -> T:
    """Call that in a process of its own, whose memory has not been used before, as that of a resumed run."""
    answers = FORK.SimpleQueue()
    process = FORK.Process(target=lambda: answers.put(work()))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"a process ended with exit code {process.exitcode}")
    return answers.get()


def save(folder: Path) -> None:
    """Run one step and save."""
    run(flags_of(folder, "--num-rollout", 1, "--save", folder / "save"))
    shutil.rmtree(folder / "run")


def without_inputs(built: Built) -> Built:
    """Leave out the comparison of data, base weights and tokenizer with what the checkpoint records of them."""
    return dataclasses.replace(built, checkpoints=dataclasses.replace(built.checkpoints, inputs=None))


@contextlib.contextmanager
def clock_of_comparing() -> Generator[list[float]]:
    """Yield a list that gets the seconds of each comparison of a block with its checksum."""
    compare, seconds = getattr(TensorFile, "_compare"), list[float]()  # noqa: B009  it is private

    def timed_compare(*args: object) -> None:
        started = time.perf_counter()
        compare(*args)
        seconds.append(time.perf_counter() - started)

    with mock.patch.object(TensorFile, "_compare", timed_compare):
        yield seconds


def timed(folder: Path, *, is_resume: bool, has_inputs: bool) -> tuple[float, float]:
    """Return the seconds of a load into a built trainer, or of a whole resume, and those of comparing blocks.

    has_inputs: whether the resumed run compares its data, base weights and tokenizer with the checkpoint's record.
    """

    async def measure(comparing: list[float]) -> tuple[float, float]:
        resolved = flags_of(folder, "--num-rollout", 2, "--load", folder / "save")
        (folder / "run").mkdir(exist_ok=True)
        started = time.perf_counter()
        with contextlib.nullcontext() if has_inputs else mock.patch.object(RunInputs, "start"):
            built = build(resolved, folder / "run")
        built = built if has_inputs else without_inputs(built)
        try:
            if is_resume:
                await built.start()
                await built.checkpoints.restore(built.parts)
            else:
                started = time.perf_counter()
                await built.parts.trainer.load(folder / "save" / NAME / "trainer")
            return time.perf_counter() - started, sum(comparing)
        finally:
            await built.close()
            built.close_files()

    with clock_of_comparing() as comparing:
        return asyncio.run(measure(comparing))


def measure(folder: Path, rounds: int, *, is_cold: bool) -> tuple[Times, int]:
    """Return seconds by what is done and whether checksums are compared, and the bytes of the checkpoint."""
    in_new_process(partial(save, folder))
    checkpoint = folder / "save" / NAME
    records = read_manifest(checkpoint)
    sizes = {name: record.num_bytes for name, record in records.items()}
    manifests = {
        True: manifest_text(1, records),
        False: json.dumps({"format": 1, "step": 1, "files": sizes}),
    }
    times: Times = {what: {True: [], False: []} for what in ("load", "resume")}
    for number in range(rounds):
        for what, by_kind in times.items():
            for is_checked in (True, False)[:: 1 if number % 2 else -1]:
                (checkpoint / MANIFEST).write_text(manifests[is_checked])
                if is_cold:
                    drop_from_cache(folder)
                is_resume = what == "resume"
                work = partial(timed, folder, is_resume=is_resume, has_inputs=is_resume and is_checked)
                by_kind[is_checked].append(in_new_process(work))
    return times, sum(sizes.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model")
    parser.add_argument("--rounds", type=int, default=9, help="loads of each kind")
    parser.add_argument("--cold", action="store_true", help="read the files from the disk, not from the page cache")
    args = parser.parse_args()
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING if not os.environ.get("DBG") else 0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_model(folder / "model", args.hidden, args.layers)
        times, size = measure(folder, args.rounds, is_cold=args.cold)
    print(f"{parameters / 1e6:.0f}M parameters, {size / 1e6:.0f} MB, {args.rounds} loads and resumes of each kind")
    for what, by_kind in times.items():
        checked, plain = ([seconds for seconds, _ in by_kind[kind]] for kind in (True, False))
        for name, of in (("median", statistics.median), ("shortest", min)):
            seconds = f"{of(checked):.3f} s, without checksums {of(plain):.3f} s"
            print(f"{what}, {name}: {seconds}, ratio {of(checked) / of(plain):.3f}")
        pairs = [one / other for one, other in zip(checked, plain, strict=True)]
        print(f"{what}, median ratio of consecutive pairs: {statistics.median(pairs):.3f}")
        compared = statistics.median(part for _, part in by_kind[True])
        shares = sorted(part / (whole - part) for whole, part in by_kind[True])
        share = f"{statistics.median(shares):.1%} of the rest (from {shares[0]:.1%} to {shares[-1]:.1%})"
        print(f"{what}, comparing blocks: {compared * 1e3:.1f} ms, {share}")


if __name__ == "__main__":
    main()
