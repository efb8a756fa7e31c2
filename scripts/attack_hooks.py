"""Attack runs from every kind of user function, and print what became of them: python scripts/attack_hooks.py.

Each cell is one `furlong train` of a tiny model, in a process of its own, whose hook attacks when it is called, or
whose module does when it is imported (`tests/helpers/hook_attacks.py`). A cell passes if the run ends within the limit
with an exit code other than 0, an error that names the file of the function and its line, no traceback of furlong, a
clean ledger, and no process, temporary folder or second copy of a message left. An attack without effect on the run,
such as a child process that ends by itself, may also leave the run to end with code 0 and all its steps.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).resolve().parents[1] / "tests"
LIMIT_S = 90.0
STEPS = 2
LEFT_S = 10.0  # after a crash, for the process that ends what user code had started
MEMORY_BYTES = 4 << 30  # of a process whose function takes memory without bound


@dataclass(frozen=True)
class Cell:
    """One run: the hook, the kind of attack, its name, and whether the import of the module attacks."""

    hook: str
    kind: str
    name: str

    @property
    def at_import(self) -> bool:
        """Whether the import attacks."""
        return self.kind.startswith("import ")


@dataclass
class Outcome:
    """What became of a cell; `faults` is empty if it passed."""

    cell: Cell
    code: int | None
    seconds: float
    faults: list[str]
    last: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hooks", nargs="*", help="hooks to attack from; default: all")
    parser.add_argument("--kinds", nargs="*", help="kinds of attacks; default: all")
    parser.add_argument("--names", nargs="*", help="attacks; default: all")
    parser.add_argument("--share", type=float, default=1.0, help="share of the cells, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2, help="runs at the same time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--keep", type=Path, help="folder to keep the files of failed cells in")
    parser.add_argument("--results", type=Path, help="file of outcomes, which later commands continue")
    flags = parser.parse_args(argv)
    sys.path.insert(0, str(TESTS / "helpers"))

    outcomes = [] if flags.results is None else read_outcomes(flags.results)
    judged = {outcome.cell for outcome in outcomes}
    cells = [cell for cell in all_cells() if _is_wanted(cell, flags)]
    cells = random.Random(flags.seed).sample(cells, round(len(cells) * flags.share))
    cells = [cell for cell in cells if cell not in judged]
    folder = Path(tempfile.mkdtemp(prefix="hooks-"))
    model, data = _files(folder)
    with concurrent.futures.ThreadPoolExecutor(flags.parallel) as pool:
        end = time.monotonic() + flags.seconds
        jobs = [pool.submit(judge, cell, folder / str(i), model, data, end) for i, cell in enumerate(cells)]
        for i, job in enumerate(jobs):
            if (outcome := job.result()) is None:
                continue
            outcomes.append(outcome)
            if flags.results is not None:
                with flags.results.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
            if outcome.faults:
                print(_line(outcome), flush=True)
                if flags.keep is not None:
                    shutil.copytree(folder / str(i), flags.keep / str(i), dirs_exist_ok=True)
            shutil.rmtree(folder / str(i), ignore_errors=True)
    shutil.rmtree(folder)
    print(table(outcomes))
    return int(any(outcome.faults for outcome in outcomes))


def read_outcomes(path: Path) -> list[Outcome]:
    """Return the outcomes of earlier commands with the same --results."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [Outcome(Cell(**row.pop("cell")), **row) for row in rows]


def all_cells() -> list[Cell]:
    """Return all combinations of hooks and attacks. An import is the same for each hook, so it has one of three."""
    import hook_attacks as own

    called = {
        "attack": own.ATTACKS, "fork": own.FORKS, "hang": own.HANGS, "memory": own.GROWTH, "value": own.VALUES,
        "change": own.CHANGES,
    }  # fmt: skip
    imports = {
        "import attack": own.ATTACKS, "import fork": own.FORKS, "import hang": own.HANGS, "import memory": own.GROWTH
    }  # fmt: skip
    cells = [Cell(hook, kind, name) for kind, names in called.items() for name in names for hook in own.HOOKS]
    at_import = ("loss", "reward_sync", "agent")
    cells += [Cell(at_import[i % 3], kind, name) for kind, names in imports.items() for i, name in enumerate(names)]
    return [*cells, *(Cell(at_import[i % 3], "source", name) for i, name in enumerate(own.SOURCES))]


def judge(cell: Cell, folder: Path, model: Path, data: Path, end: float) -> Outcome | None:
    """Run a cell and compare its end with what must hold; None if it would start after `end`."""
    if time.monotonic() > end:
        return None
    import hook_attacks as own
    from runs import FORKED, MARK, flags, marked_processes

    folder.mkdir()
    (folder / "tmp").mkdir()
    words = ["train", *flags(model, data, folder / "run", **_changes(cell, folder, data))]
    started = time.monotonic()
    variables = {MARK: str(folder), "TMPDIR": str(folder / "tmp"), "ATTACKED_RUN": str(folder / "run")}
    limit = MEMORY_BYTES if cell.kind.endswith("memory") else None
    process = FORKED.Process(target=own.attacked_command, args=(words, folder / "log.txt", variables, limit))
    process.start()
    process.join(LIMIT_S)
    seconds = time.monotonic() - started
    is_late = process.is_alive()
    code = process.exitcode
    process.kill()
    process.join()
    end = time.monotonic() + LEFT_S
    while (left := marked_processes(str(folder))) and time.monotonic() < end:
        time.sleep(0.1)
    for each in psutil.process_iter():
        try:
            if each.environ().get(MARK) == str(folder):
                each.kill()
        except psutil.Error:
            continue
    log = (folder / "log.txt").read_text("utf-8", "replace") if (folder / "log.txt").exists() else ""
    faults = [f"still ran after {LIMIT_S:g} s"] if is_late else _faults(cell, folder, code, log)
    faults += [f"left the process {text[:60]}" for text in left]
    if names := [path.name for path in (folder / "tmp").iterdir() if path.name.startswith(("furlong", "pymp"))]:
        faults.append(f"left {names} in the temporary folder")
    last = next((line for line in reversed(log.splitlines()) if "attack" in line), log[-200:])
    return Outcome(cell, code, seconds, faults, last.strip()[:300])


def _changes(cell: Cell, folder: Path, data: Path) -> dict[str, Any]:
    import hook_attacks as own

    tables = {"attack": own.ATTACKS, "fork": own.FORKS, "hang": own.HANGS, "memory": own.GROWTH}
    kind = cell.kind.removeprefix("import ")
    if kind in tables:
        what = own.write_attack(folder, cell.hook, attack=tables[kind][cell.name], at_import=cell.at_import)
    elif kind == "value":
        what = own.write_attack(folder, cell.hook, value=own.VALUES[cell.name])
    elif kind == "change":
        what = own.write_attack(folder, cell.hook, change=own.CHANGES[cell.name])
    else:
        what = own.write_attack(folder, cell.hook)
        (folder / "attack.py").write_bytes(own.SOURCES[cell.name])
    if "eval_interval" in what or cell.hook == "eval":
        what |= {"eval_prompt_data": ["own", data]}
    return {
        "num_rollout": STEPS, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 4,
        "input_key": "prompt", "hang_timeout": 8, "on_hang": "stop-user-code" if cell.kind == "hang" else "stop",
        "reward_timeout": 5 if cell.kind == "hang" else 20,
        "hook_import_timeout": 6 if cell.kind == "import hang" else 30,
        "save": folder / "save", "save_interval": 1,
    } | what  # fmt: skip


def _faults(cell: Cell, folder: Path, code: int | None, log: str) -> list[str]:
    """Return what is wrong with the end of a run."""
    from furlong.data.audit import audit
    from furlong.errors import DataError

    faults: list[str] = []
    path = folder / "run" / "metrics.jsonl"
    steps = path.read_text().count("\n") if path.exists() else 0
    is_complete = code == 0 and steps >= STEPS
    if code == 0 and not is_complete:
        faults.append(f"exit code 0 after {steps} of {STEPS} steps")
    if code not in (0, 1, 2) and cell.name not in OF_SIGNALS and (cell.name, code) != ("descriptors", -signal.SIGABRT):
        faults.append(f"exit code {code}")
    if "Traceback (most recent" in log and cell.name != "child":  # which is Python, too
        faults.append("a traceback")
    if not is_complete and not re.search(r"attack\.py[:\"]", log):
        faults.append("the error does not name the file")
    elif not is_complete and not is_lineless(cell) and not LINE.search(log):
        faults.append("the error names no line")
    is_harmless = cell.name in (*HARMLESS, *HARMLESS_FOR.get(cell.hook, ()), *(BUILDING if cell.at_import else ()))
    if is_complete and is_harmless:
        pass
    elif is_complete and cell.name in UNDONE:
        faults += [] if "attack.py" in log else ["not reported in the log"]
    elif is_complete and cell.hook in OF_SAMPLES and cell.kind == "attack":
        is_counted = any(row.get(f"rollout/{name}") for row in _rows(path) for name in FAILURES)
        faults += [] if is_counted or "attack.py" in log else ["no effect on the run, not counted"]
    elif is_complete and cell.kind in ENDING:
        faults.append("no effect on the run")
    if (folder / "run" / "ledger.jsonl").exists():
        try:
            result = audit(folder / "run" / "ledger.jsonl", finished=False)
        except DataError as error:
            faults.append(f"the ledger is unreadable: {error}")
        else:
            faults += [] if result.ok else [f"the ledger is not clean: {result.summary()}"]
    ends = Counter(line[20:] for line in log.splitlines() if "the run ended after" in line or "Error:" in line)
    faults += [f"said {count} times: {line[:60]}" for line, count in ends.items() if count > 1]
    return faults


LINE = re.compile(r"attack\.py(:|\", line |: line |.{0,40}line )\d+")


def is_lineless(cell: Cell) -> bool:
    """Whether only the file can be named: compiled code ended the import, or there is no line to name."""
    return (cell.at_import and cell.name in OF_C) or cell.name in ("null bytes", "UTF-16", "no function")


# Attacks that a run may survive with all its steps: they change nothing that it needs, or only a thread ends.
HARMLESS = ("SystemExit of a thread", "torch grad", "torch seed", "torch threads", "asyncio.run", "atexit")
# Reward functions have processes of their own, whose state is theirs. Two hooks are called before there is a loop.
OWN_STATE = ("umask", "low AS", "low NOFILE", "torch dtype", "logging", "excepthook", "warnings", "locale", "chdir",
             "SIGTERM ignored")  # fmt: skip
BUILDING = ("event loop stopped", "event loop closed", "run folder")
HARMLESS_FOR = {
    **dict.fromkeys(("reward", "reward_async", "reward_sync"), OWN_STATE),
    **dict.fromkeys(("megatron_init", "provider"), BUILDING),
}
OF_C = ("C exit", "C _exit", "C exit itself", "SIGKILL", "SIGSEGV", "SIGABRT", "alarm", "setitimer", "SIGINT default")
UNDONE = ("logging",)  # attacks that a run undoes with a warning
# Attacks by a signal that no program can handle, or by default does not; the process beside the run names the function.
# PyTorch's own threads abort the process if their descriptors are closed.
OF_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGINT default", "alarm", "setitimer")
ENDING = ("attack", "import attack", "source")  # kinds of attacks that otherwise end the run
# Hooks whose failure fails only the sample, and the metrics that count it.
OF_SAMPLES = ("generate", "reward_async", "reward_sync", "agent", "environment", "match", "leaves", "tool_parser")
FAILURES = ("generate_failed", "generate_timed_out", "reward_failed", "episodes/agent_error", "episodes/env_error")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _files(folder: Path) -> tuple[Path, Path]:
    from furlong.quickstart.addition import problems, write_prompts
    from furlong.quickstart.quickstart import model_folder

    data = folder / "problems.jsonl"
    write_prompts(data, problems(16, seed=3))
    return model_folder(), data


def _is_wanted(cell: Cell, flags: argparse.Namespace) -> bool:
    return all(
        wanted is None or value in wanted
        for wanted, value in ((flags.hooks, cell.hook), (flags.kinds, cell.kind), (flags.names, cell.name))
    )


def _line(outcome: Outcome) -> str:
    cell = outcome.cell
    what = "; ".join(outcome.faults)
    how = f"code {outcome.code}, {outcome.seconds:.0f} s"
    return f"{cell.hook} | {cell.kind} | {cell.name} | {how} | {what} | {outcome.last}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return cells, failures and times of each kind of attack as a Markdown table."""
    lines = ["| kind | cells | passed | ended with an error | longest, s |", "|---|---|---|---|---|"]
    for kind in [*dict.fromkeys(outcome.cell.kind for outcome in outcomes), "all"]:
        rows = [outcome for outcome in outcomes if kind in (outcome.cell.kind, "all")]
        passed, ended = sum(not row.faults for row in rows), sum(row.code != 0 for row in rows)
        lines.append(f"| {kind} | {len(rows)} | {passed} | {ended} | {max(row.seconds for row in rows):.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
