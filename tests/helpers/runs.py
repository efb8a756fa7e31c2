"""Complete runs with a model of a few thousand parameters: build flags, start runs, and read their output."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import psutil
import torch
from transformers import GenerationConfig, PretrainedConfig, Qwen3Config

from furlong.config.command_line import load
from furlong.core.sample import Sample
from furlong.files.sample_file import load_samples
from furlong.inference.supervisor.launch import argv_from_options
from furlong.inference.supervisor.process import LocalHost
from furlong.models.hf_model import build_model, save_model
from furlong.models.tokenizer import build_tokenizer
from furlong.run.launch import run
from furlong.tools.run_diff import MEASURED

REPOSITORY = Path(__file__).resolve().parents[2]
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=.:\\{} \n"
MARK = "RUN_OF_TEST"  # environment variable that identifies the processes of a run
Row = dict[str, Any]
Fault = Callable[[], None]  # called in a process before its command

# Start processes with all imports done, which saves seconds. CUDA needs a new interpreter.
FORKED = multiprocessing.get_context("spawn" if torch.backends.cuda.is_built() else "forkserver")
FORKED.set_forkserver_preload(["furlong.wiring.build", "furlong.cli", "furlong.inference.server.http_server", "runs"])


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    width: int = 32,
    config_class: type[PretrainedConfig] = Qwen3Config,
    **changes: Any,
) -> Path:
    """Write a random Qwen3 of two layers with a tokenizer of single characters. `changes` replace config values."""
    tokenizer = build_tokenizer(ALPHABET)
    config = config_class(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    model = build_model(config, seed=seed, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int = 24, **columns: Any) -> Path:
    """Write rows {"input": "3+4=", "label": "7"}; `columns` go into every row."""
    path.write_text(
        "".join(json.dumps({"input": f"{i}+{2 * i}=", "label": str(3 * i)} | columns) + "\n" for i in range(count))
    )
    return path


def write_prompts_bad_beyond_the_preflight(path: Path) -> Path:
    """Write rows with an unusable one that is too far into the file for the preflight check."""
    lines = write_prompts(path, 600).read_text().splitlines()
    lines[200] = '{"input": ""}'
    path.write_text("\n".join(lines) + "\n")
    return path


def flags(model: Path, data: Path | None, output: Path, *more: Any, **changes: Any) -> list[str]:
    """Return flags of a small run. `changes` set flags by field name; None omits a flag, True means no value."""
    values: dict[str, Any] = {
        "hf_checkpoint": model,
        "prompt_data": data,
        "label_key": "label",
        "rm_type": "random",
        "num_rollout": 2,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 8,
        "lr": 1e-2,
        "num_threads": 1,
        "no_use_tensorboard": True,
        "output_dir": output,
    }
    return argv_from_options(values | changes) + [str(word) for word in more]


def train(argv: list[str], **preset: Any) -> int:
    """Run in this process, and return the number of rollouts trained."""
    return run(load(argv, preset=preset))


def sampled(model: Path, data: Path, folder: Path, **changes: Any) -> tuple[list[list[Sample]], Path]:
    """Train two rollouts of up to 24 tokens, and return the samples of each and the run's folder."""
    dump, long = folder / "samples_{rollout_id}.safetensors", {"rollout_max_response_len": 24}
    assert train(flags(model, data, folder / "run", save_debug_rollout_data=dump, **long | changes)) == 2
    dumps = [load_samples(folder / f"samples_{i}.safetensors") for i in range(2)]
    return [[sample for group in dumped.groups for sample in group.samples] for dumped in dumps], folder / "run"


def rows(folder: Path) -> list[Row]:
    """Return the rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def reproducible(row: Row) -> Row:
    """Return the reproducible part of a row, without timings and start-up measurements."""
    return {name: value for name, value in row.items() if not name.startswith(MEASURED)}


def differences(one: Sequence[Row], other: Sequence[Row]) -> list[tuple[int, str, Any, Any]]:
    """Return row number, name and both values of each difference between the rows of two runs."""
    return [
        (number, name, a.get(name), b.get(name))
        for number, (a, b) in enumerate(itertools.zip_longest(one, other, fillvalue={}))
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]


def is_finite(row: Row) -> bool:
    """Return whether all values of a row are finite; metrics.jsonl has null for other values."""
    return all(value is not None and math.isfinite(value) for value in row.values())


def ledger_events(folder: Path) -> list[dict[str, Any]]:
    """Return all events of a run's ledger."""
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines() if line]


def trainer_bytes(save: Path, step: int) -> dict[str, bytes]:
    """Return the contents of the trainer's files in a checkpoint."""
    folder = save / f"iter_{step:07d}" / "trainer"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a fresh machine: an empty home, one thread, no network."""
    home.mkdir(parents=True, exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY / "src"),  # use this checkout, not an installed package
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LANG": "C.UTF-8",
    }


def free_ports(count: int) -> list[int]:
    """Return consecutive free ports outside the range for outgoing connections."""

    async def found() -> list[int]:
        host = LocalHost()
        ports = await host.reserve_ports(count)
        await host.release_ports(ports)
        return ports

    return asyncio.run(found())


def start(
    words: list[str], cwd: Path, *, script: str | None = None, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    """Start `python script ...` or `python -m furlong ...` in another folder with an empty home."""
    cwd.mkdir(parents=True, exist_ok=True)
    entry = ["-m", "furlong"] if script is None else [str(REPOSITORY / script)]
    return subprocess.Popen(
        [sys.executable, *entry, *words],
        cwd=cwd,
        env=environment(cwd / "home") | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], *, timeout_s: float = 120) -> tuple[int, str, str]:
    """Wait for a process, and return its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, err


class Child:
    """A run in a forked process with all imports done, so that signals arrive during the run and not during imports.

    Its flags use `folder`/run and `folder`/save, and its output goes to `folder`/log.txt. The fixture `forked` kills
    the remaining processes in `started`. `variables` are set in its environment, and `prepare` is called in it.
    """

    started: ClassVar[list[Child]] = []

    def __init__(
        self,
        forked: Any,
        argv: list[str],
        folder: Path,
        name: object = "",
        *,
        prepare: Callable[[], None] | None = None,
        **variables: str,
    ) -> None:
        self.folder, self.mark, self.log = folder, f"{folder}/{name}", folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self.process = forked.Process(target=run_in_child, args=(argv, self.log, self.mark, variables, prepare))
        self.process.start()
        self.started.append(self)

    def wait_for_step(self, timeout_s: float = 30) -> None:
        """Wait until another step has been recorded."""
        before, deadline = num_rows(self.folder), time.monotonic() + timeout_s
        while num_rows(self.folder) == before:
            assert self.process.is_alive(), self.log.read_text()
            assert time.monotonic() < deadline, "no step in time"
            time.sleep(0.001)

    def kill(self) -> None:
        """Kill the process with SIGKILL if it is alive, and check that no child process survives."""
        self.process.kill()
        self.process.join()
        deadline = time.monotonic() + 40  # on a busy machine: one agent of Ray was seen after 20 s
        while (left := marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"processes outlive the run: {left}"


def num_rows(folder: Path) -> int:
    """Return how many steps the run of a Child has recorded."""
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_in_child(
    argv: list[str], log: Path, mark: str, variables: dict[str, str], prepare: Callable[[], None] | None = None
) -> None:
    """Body of a forked process: run `train.py argv` with its output in `log`, and exit with its code."""
    from furlong.cli import main_train

    os.environ.update(variables, **{MARK: mark})
    tempfile.tempdir = None  # is read from TMPDIR again
    print_to(log)
    if prepare is not None:
        prepare()
    raise SystemExit(main_train(argv))


def command_in_child(words: list[str], log: Path, fault: Fault | None = None) -> None:
    """Body of a forked process: run `furlong words` with its output in `log`, and exit with its code."""
    from furlong.cli import main

    print_to(log)
    if fault is not None:
        fault()
    raise SystemExit(main(words))


def print_to(log: Path) -> None:
    """Redirect the output of this process to `log`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def marked_processes(mark: str) -> list[str]:
    """Return the command lines of live processes started by a run with this mark."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
