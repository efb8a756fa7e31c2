"""Run furlong under random faults for a long time: `make soak`, or `python scripts/soak.py --minutes 30 [--seed N]`.

An asynchronous run with two `furlong serve` engines behind a router, on a CPU with the quickstart's model, goes through
cycles. In the first 40 % of a cycle, faults end or stop its processes, including the driver, which is then resumed with
the same command. In the rest, only the user's functions fail, and growth of memory and descriptors is measured: at
most twice a second, after a step, for every process. Memory is what the driver has from malloc, and what is resident
of the others. At the end the run finishes and its ledger is audited.

Exit code 1 if a fault was not survived, a process outlived its driver, memory of some kind of process grows by 1 MB or
more per 1,000 steps, descriptors grow, or the ledger is not clean. Descriptors are judged after 2,500 steps of the
driver (10 to 15 minutes on two cores), memory after 4,600 (18 to 26 minutes); a line says what was not. The folder has
everything: `soak.json` with the seed and all faults, `usages.jsonl`, `driver.log`, `run/` and `save/`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from furlong.data.audit import audit
from furlong.errors import DataError
from furlong.quickstart.addition import problems, write_prompts
from furlong.quickstart.quickstart import model_folder
from soak_growth import ProcessSampler, growth, growth_table
from soak_hooks import GENERATE_FAULTS, REWARD_FAULTS

HERE = Path(__file__).resolve().parent
HAS_ROUTER = importlib.util.find_spec("sglang_router") is not None
NUM_ENGINES = 2
SURVIVE_S = 150.0  # limit for a fault: a machine with two busy cores takes 40 s to resume
CYCLE_S, STORM = 1800.0, 0.4  # faults end processes in the first part of each cycle
PRIMITIVES = (
    "64"  # that oneDNN keeps, one for each shape of a batch; its default of 1,024 takes thousands of steps to fill
)
STEPS_AFTER = 3  # steps after a fault, until it counts as survived
SAMPLE_S, POLL_S = 0.5, 0.02
LEFT_S = 15.0  # for the descendants of a driver that has ended
STORM_PAUSE_S, CALM_PAUSE_S = (0.5, 4.0), (3.0, 9.0)  # between two faults
PAUSED_S = 1.5  # between SIGSTOP and SIGCONT, below the time limit of a health check
RESUMES = ("driver killed", "disk full")
STOPS = ("engine killed", "engine stopped", "engine paused", *(("router killed", "router paused") * HAS_ROUTER))


class SoakError(Exception):
    """The run did not survive, or left something behind."""


@dataclass
class Fault:
    """A fault: its kind, when and at which step it was injected, and how long it took to survive it (None: not)."""

    kind: str
    at_s: float
    step: int
    survived_s: float | None = None


def flags(folder: Path, *, num_rollout: int) -> list[str]:
    """Return the flags of the run."""
    values: dict[str, object] = {
        "--hf-checkpoint": model_folder(),
        "--prompt-data": folder / "problems.jsonl",
        "--input-key": "prompt",
        "--label-key": "label",
        "--custom-rm-path": f"{HERE}/soak_hooks.py:reward",
        "--custom-generate-function-path": f"{HERE}/soak_hooks.py:generate",
        "--reward-timeout": 3,
        "--generate-timeout": 10,
        "--num-reward-workers": 1,
        "--engine": "embedded",
        "--rollout-num-gpus": NUM_ENGINES,
        "--sglang-router-strategy": "round_robin" if HAS_ROUTER else "direct",
        "--use-fault-tolerance": None,
        "--rollout-health-check-interval": 1,
        "--rollout-health-check-timeout": 5,
        "--rollout-max-engine-restarts": 10**6,
        "--update-weight-timeout": 20,
        "--async-buffer-size": 1,
        "--num-rollout": num_rollout,
        "--rollout-batch-size": 2,
        "--n-samples-per-prompt": 4,
        "--rollout-max-response-len": 6,
        "--rollout-shuffle": None,
        "--lr": 1e-6,
        "--num-threads": 1,
        "--hang-timeout": 60,
        "--no-use-tensorboard": None,
        "--output-dir": folder / "run",
        "--save": folder / "save",
        "--load": folder / "save",
        "--save-interval": 20,
        "--keep-checkpoints": 2,
    }
    return [word for name, value in values.items() for word in (name, *([] if value is None else [str(value)]))]


@dataclass
class SoakRun:
    """A run that is started, watched, and resumed."""

    folder: Path
    sampler: ProcessSampler = field(init=False)
    num_steps: int = 0  # including those that a resume repeats
    step: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _log: threading.Thread | None = None
    _family: list[psutil.Process] = field(default_factory=list[psutil.Process])
    _sampled_at: float = 0.0
    _size: int = -1

    def __post_init__(self) -> None:
        self.sampler = ProcessSampler(self.folder / "allocated")

    def start(self, *, num_rollout: int = 10**6) -> None:
        """Start the run, or resume it."""
        self._size, self.step = self._metrics_size(), last_step(self._metrics)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": PRIMITIVES,
            "PYTHONMALLOC": "malloc",  # so that its statistics count Python objects
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "furlong", "train", *flags(self.folder, num_rollout=num_rollout)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        # Through a pipe: a driver whose disk is full can still print its last words.
        self._log = threading.Thread(target=self._copy_output, args=(self._process,), daemon=True)
        self._log.start()

    @property
    def driver(self) -> psutil.Process:
        """The driver. Raises SoakError if it has ended."""
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise SoakError(
                f"the driver ended with exit code {code}; the last lines of driver.log:\n{self.last_words()}"
            )
        return psutil.Process(self._process.pid)

    @property
    def _metrics(self) -> Path:
        return self.folder / "run" / "metrics.jsonl"

    def _metrics_size(self) -> int:
        return self._metrics.stat().st_size if self._metrics.exists() else -1

    def find(self, kind: str) -> list[psutil.Process]:
        """Return the processes of a kind."""
        return [process for each, process in self.living() if each == kind]

    def living(self) -> list[tuple[str, psutil.Process]]:
        """Return the living processes of the run with their kinds."""
        found = self.sampler.processes(self.driver)
        self._remember(found)
        return found

    def _remember(self, found: Sequence[tuple[str, psutil.Process]]) -> None:
        known = set(self._family)
        self._family += [process for _, process in found if process not in known]

    def watch(self) -> bool:
        """Return whether another step was recorded; sample all processes if so."""
        driver = self.driver
        size = self._metrics_size()
        if size == self._size:
            return False
        step, before = last_step(self._metrics), self.step
        self._size, self.step = size, step
        if step <= before:  # a resume rolls steps back
            return False
        self.num_steps += step - before
        if time.monotonic() - self._sampled_at >= SAMPLE_S:
            self._sampled_at = time.monotonic()
            self.sampler.sample(driver, step)
        return True

    def is_whole(self) -> bool:
        """Return whether both engines and the router are there, and every engine that was lost serves again."""
        kinds = Counter(kind for kind, _ in self.living())
        events = (self.folder / "run" / "events.jsonl").read_bytes().rpartition(b'"event":"engines_started"')[2]
        is_back = events.count(b'"event":"engine_lost"') == events.count(b'"event":"engine_restarted"')
        return is_back and kinds["engine"] == NUM_ENGINES and kinds["router"] >= HAS_ROUTER

    def wait_for_end(self, timeout_s: float) -> int:
        """Return the driver's exit code once it and its descendants have ended.

        Raises SoakError if one of them is alive after `timeout_s` seconds; it is killed then.
        """
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            self._remember(self.sampler.processes(psutil.Process(self._process.pid)))
            time.sleep(POLL_S)
        deadline = max(deadline, time.monotonic() + LEFT_S)
        while (left := [each for each in self._family if is_alive(each)]) and time.monotonic() < deadline:
            self._process.poll()  # else it stays a zombie
            time.sleep(POLL_S)
        names: list[str] = []
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(" ".join(process.cmdline())[:200])
                process.kill()
        code = self._process.wait(LEFT_S)
        self._family.clear()
        assert self._log is not None
        self._log.join(LEFT_S)
        if names:
            raise SoakError(f"{len(names)} processes were alive {timeout_s:g} s after the driver was to end: {names}")
        return code

    def close(self) -> None:
        """End every process that is left."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        with contextlib.suppress(SoakError):
            self.wait_for_end(20)

    def last_words(self) -> str:
        """Return the end of the driver's output."""
        path = self.folder / "driver.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""

    def _copy_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with (self.folder / "driver.log").open("ab") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def last_step(path: Path) -> int:
    """Return the step of the last whole line of a metrics.jsonl, 0 without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


class Injector:
    """Injects faults into a run in a random order that its seed determines, and waits until each is survived."""

    def __init__(self, run: SoakRun, rng: random.Random, began: float) -> None:
        self._run, self._rng, self._began = run, rng, began
        self.faults: list[Fault] = []
        self._bag: list[str] = []
        (run.folder / "faults").mkdir(exist_ok=True)

    def storm(self, until: float) -> None:
        """Inject faults that end or stop processes, until a time or until each happened once."""
        bag = [*RESUMES, *STOPS, *STOPS]
        self._rng.shuffle(bag)
        while bag and time.monotonic() < until:
            self._inject(bag.pop())
            self._pause(STORM_PAUSE_S)

    def calm(self, until: float) -> None:
        """Inject faults of user functions, which end no process but reward workers."""
        while time.monotonic() < until:
            self._bag = self._bag or self._rng.sample(kinds := (*REWARD_FAULTS, *GENERATE_FAULTS), len(kinds))
            self._inject(self._bag.pop())
            self._pause(CALM_PAUSE_S)

    def _pause(self, between: tuple[float, float]) -> None:
        deadline = time.monotonic() + self._rng.uniform(*between)
        while time.monotonic() < deadline:
            self._run.watch()
            time.sleep(POLL_S)

    def _inject(self, kind: str) -> None:
        if kind in STOPS and not self._run.is_whole():  # a busy machine may have cost an engine its health check
            self.wait_for_steps(self._run.is_whole)
        fault = Fault(kind, time.monotonic() - self._began, self._run.step)
        self.faults.append(fault)
        started = time.monotonic()
        gone = self._cause(kind)
        self.wait_for_steps(lambda: not gone() and self._run.is_whole())
        fault.survived_s = time.monotonic() - started
        print(f"{fault.at_s:7.1f} s, step {fault.step}: {kind}; survived after {fault.survived_s:.1f} s", flush=True)

    def wait_for_steps(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Wait until the run has recorded more steps and is whole again. Raises SoakError after the limit."""
        deadline, more = time.monotonic() + SURVIVE_S, 0
        while more < STEPS_AFTER or not is_ready():
            more += self._run.watch()
            if time.monotonic() > deadline:
                missing = f"{more} of {STEPS_AFTER} steps" if more < STEPS_AFTER else "not all engines and the router"
                raise SoakError(f"{missing} within {SURVIVE_S:g} s; driver.log:\n{self._run.last_words()}")
            time.sleep(POLL_S)

    def _cause(self, kind: str) -> Callable[[], bool]:
        """Cause a fault; return a function that says whether its process is still there or its request open."""
        if kind in RESUMES:
            self._end_driver(kind)
            self._run.start()
            return lambda: False
        if kind in STOPS:
            what, _, how = kind.partition(" ")
            return self._signal(self._rng.choice(self._run.find(what)), how)
        request = self._run.folder / "faults" / kind
        request.touch()
        return request.exists

    @staticmethod
    def _signal(process: psutil.Process, how: str) -> Callable[[], bool]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if how == "killed":
                process.kill()
            else:
                process.suspend()
        if how != "paused":  # the run has to end a stopped process
            return lambda: is_alive(process)
        time.sleep(PAUSED_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
        return lambda: False

    def _end_driver(self, kind: str) -> None:
        driver = self._run.driver
        self._run.living()  # remembers all that have to end with it
        if kind == "driver killed":
            driver.kill()
            self._run.wait_for_end(LEFT_S)
            return
        # Writes beyond a size fail (EFBIG), in the middle of a line of the ledger.
        ledger = self._run.folder / "run" / "ledger.jsonl"
        _, hard = driver.rlimit(psutil.RLIMIT_FSIZE)
        driver.rlimit(psutil.RLIMIT_FSIZE, (ledger.stat().st_size + self._rng.randrange(1, 400), hard))
        if (code := self._run.wait_for_end(60)) != 1:
            raise SoakError(f"the driver ended with exit code {code} on a full disk, not 1:\n{self._run.last_words()}")


def finish(run: SoakRun) -> list[str]:
    """End the run with SIGTERM, resume it for its last steps, and audit its ledger; return what is wrong."""
    step = run.step
    run.driver.terminate()
    code = run.wait_for_end(60)
    found = [] if code == 128 + signal.SIGTERM else [f"SIGTERM ended the run with exit code {code}, not 143"]
    run.start(num_rollout=step + STEPS_AFTER)
    code = run.wait_for_end(SURVIVE_S)
    if code:
        found.append(f"the last part of the run ended with exit code {code}:\n{run.last_words()}")
    result = audit(run.folder / "run" / "ledger.jsonl", finished=True)
    print(result.summary())
    return found if result.ok else [*found, f"the ledger has {result.num_problems} problems"]


def report(run: SoakRun, faults: Sequence[Fault], warm_up: int) -> list[str]:
    """Print the tables; return what is wrong."""
    injected, survived = Counter(f.kind for f in faults), Counter(f.kind for f in faults if f.survived_s is not None)
    longest = {kind: max((f.survived_s or 0.0 for f in faults if f.kind == kind), default=0.0) for kind in injected}
    print("\n| fault | injected | survived | longest, s |\n|---|---|---|---|")
    for kind, count in sorted(injected.items()):
        print(f"| {kind} | {count} | {survived[kind]} | {longest[kind]:.1f} |")
    rows = growth(run.sampler.usages, warm_up=warm_up)
    print("\n" + "\n".join(growth_table(rows)))
    print("\n".join(["", *(line for row in rows for line in row.not_judged)]))
    return [problem for row in rows for problem in row.problems]


def soak(folder: Path, *, minutes: float, seed: int, warm_up: int) -> int:
    """Run the soak; return the exit code."""
    write_prompts(folder / "problems.jsonl", problems(512, seed=seed))
    run, began = SoakRun(folder), time.monotonic()
    injector, wrong = Injector(run, random.Random(seed), began), list[str]()
    end = began + 60 * minutes
    cycles = max(1, round(60 * minutes / CYCLE_S))
    try:
        run.start()
        injector.wait_for_steps(run.is_whole)
        for cycle in range(cycles):
            start, stop = time.monotonic(), began + (end - began) * (cycle + 1) / cycles
            injector.storm(start + STORM * (stop - start))
            injector.calm(stop)
        wrong += finish(run)
    except (SoakError, DataError, psutil.NoSuchProcess, subprocess.TimeoutExpired) as error:
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        run.close()
        record = {"seed": seed, "minutes": minutes, "faults": [dataclasses.asdict(f) for f in injector.faults]}
        (folder / "soak.json").write_text(json.dumps(record, indent=1) + "\n")
        with (folder / "usages.jsonl").open("w") as file:
            file.writelines(json.dumps(dataclasses.asdict(usage)) + "\n" for usage in run.sampler.usages)
    wrong = report(run, injector.faults, warm_up) + wrong
    print(f"\n{run.num_steps:,} steps in {(time.monotonic() - began) / 60:.1f} minutes, seed {seed}, folder {folder}")
    print(
        "\n".join(f"wrong: {text}" for text in wrong)
        or "every fault was survived, nothing that was judged grows, the ledger is clean"
    )
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="order of the faults; default: a random one, printed")
    parser.add_argument("--warm-up", type=int, default=1000, help="steps of each process that do not count")
    parser.add_argument("--folder", type=Path, default=None, help="an empty folder; default: a temporary one")
    options = parser.parse_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="furlong-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--folder {folder} is not empty; use a new one")
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    print(f"seed {seed}, folder {folder.resolve()}", flush=True)
    return soak(folder.resolve(), minutes=options.minutes, seed=seed, warm_up=options.warm_up)


if __name__ == "__main__":
    raise SystemExit(main())
