"""Runs one training: threads, the run's folder, logging, the loop, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.logging import RichHandler

from furlong import __version__
from furlong.config.flags import Resolved
from furlong.config.problem import Problem
from furlong.config.sections import CheckpointFlags, Config
from furlong.core import trace
from furlong.core.checkpoint_folder import TRACKER, continued, threads_of
from furlong.core.diagnosis import Diagnosis
from furlong.doctor.diff import different_flags, flags_of
from furlong.doctor.preflight import preflight
from furlong.errors import ConfigError, DiagnosisError, FurlongError
from furlong.machine import (
    LOG_FORMAT,
    Threads,
    choose_threads,
    deterministic,
    heap_at_rest,
    nccl_as_engines_have_it,
)

if TYPE_CHECKING:
    from furlong.build import Built
    from furlong.doctor.hang import HangWatch
    from furlong.doctor.postmortem.memory import MemoryAccount
    from furlong.ports import Observer

logger = logging.getLogger("furlong")

TERMINATED = 128 + signal.SIGTERM  # exit code
YOUNG_OBJECTS = 50_000  # new objects between two garbage collections, at least,
OBJECTS_A_SAMPLE = 100  # and for each sample of a rollout,
MOST_OBJECTS = 2**31 - 1  # which is what the collector can count
MIN_GAIN = 0.8  # several threads are used if they take at most this share of the time of one


def run(resolved: Resolved, problems: Sequence[Problem] = ()) -> int:
    """Train as configured; returns the number of rollouts trained. The run's folder holds all that it writes.

    `problems` are those that were found while the flags were read. Raises ConfigError with these and with every error
    of the preflight, before anything is written; SystemExit with code 143 once SIGTERM has ended the run in good order.
    """
    config = resolved.config
    found = preflight(config, problems)
    if errors := [finding.text() for finding in found if finding.severity == "error"]:
        raise ConfigError(*errors)
    folder = run_folder(resolved)
    nccl_as_engines_have_it()
    fixed = deterministic() if config.train.deterministic_mode else contextlib.nullcontext()
    with _logging(config.track.log_level, folder / "run.log"), fixed:
        is_async = bool(config.rollout.async_buffer_size)
        say_changed_flags(folder, resolved)
        (folder / "config.json").write_text(resolved.to_json())
        # processes are told of the trace when they are built
        with _explained(resolved, folder) as memory, _traced(folder, wanted=config.debug.trace):
            with heap_at_rest("furlong.build"):
                collect_rarely(config)
                chosen = choose_threads(config.cluster.num_threads, num_parts=2 if is_async else 1)
                threads = set_threads(as_before(chosen, config.checkpoint))
                from furlong.build import build  # after the threads are set: it imports torch

            memory.note()
            count = f"{threads.count} thread{'s' * (threads.count != 1)}"
            logger.info("run folder %s; %s: %s", folder, count, threads.reason)
            if config.checkpoint.save is None and config.data.num_rollout != 0 and not config.debug.debug_rollout_only:
                logger.info("weights are not kept: --save DIR writes checkpoints, and --save-hf model folders")
            for finding in found:
                level = logging.WARNING if finding.severity == "warning" else logging.INFO
                logger.log(level, "%s", finding.text())
            return _run_built(build(resolved, folder), resolved, folder, found, threads)


def _run_built(built: Built, resolved: Resolved, folder: Path, found: Sequence[Diagnosis], threads: Threads) -> int:
    """Run what was built and close its files, however it ends."""
    from furlong.doctor.hang import HangWatch

    fault = resolved.config.fault
    hang = HangWatch(
        folder,
        seconds=fault.hang_timeout,
        observer=built.watch,
        stops=fault.on_hang == "stop",
        depths=built.queues,
        stacks=built.stacks,
    )
    try:
        with (
            _recorded(built.watch, found, threads=threads.count),
            threads_heard(built.watch),
            hang,
        ):
            started = time.monotonic()
            step = asyncio.run(_drive(built, hang))
            logger.info("the run ended after step %d, in %.0f s: %s", step, time.monotonic() - started, folder)
            return step
    except _TerminatedError:
        logger.warning("ended by SIGTERM; %s", _way_on(resolved.config))
        raise SystemExit(TERMINATED) from None
    except KeyboardInterrupt:
        logger.warning("ended by Ctrl-C; %s", _way_on(resolved.config))
        raise
    finally:
        built.close_files()


def _way_on(config: Config) -> str:
    """What to do with a run that was ended from outside."""
    save = config.checkpoint.save
    if save is None:
        return "no weights were kept, since --save was not given"
    return f"the same command with --load {save} goes on from the last checkpoint"


class _TerminatedError(Exception):
    """SIGTERM came."""


async def _drive(built: Built, hang: HangWatch) -> int:
    """Run the loop and close its parts, whatever ends it.

    Raises _TerminatedError if SIGTERM did, DiagnosisError if a diagnosis did, the trainer's error if a process of it is
    gone.
    """
    from furlong.loop.train import train
    from furlong.ports import Mortal

    task = asyncio.current_task()
    assert task is not None
    hang.attach(task)
    signals: list[int] = []
    lost: list[FurlongError] = []
    watching: list[asyncio.Task[None]] = []

    async def watch(trainer: Mortal) -> None:
        lost.append(await trainer.lost())
        task.cancel()

    def end(number: int) -> None:
        signals.append(number)
        task.cancel()

    if threading.current_thread() is threading.main_thread():  # no other thread may handle signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end, signal.SIGTERM)
    try:
        await built.start()
        if isinstance(built.parts.trainer, Mortal):
            watching.append(asyncio.create_task(watch(built.parts.trainer)))
        step = await train(built.parts, built.plan, built.checkpoints)
        if (found := built.watch.ended_by) is not None:
            raise DiagnosisError(f"--on-diagnosis ended the run after step {step}:\n{found.text()}")
        return step
    except asyncio.CancelledError:
        if signals:
            raise _TerminatedError("SIGTERM") from None
        if lost:
            raise lost[0] from None
        if (found := built.watch.ended_by) is not None:
            raise DiagnosisError(f"the run was ended while it waited:\n{found.text()}") from None
        raise
    finally:
        for watcher in watching:
            watcher.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await built.close()


def run_folder(resolved: Resolved) -> Path:
    """Make the run's folder. One in which steps are recorded is only used again by the run that it is of.

    That is a run that finds a checkpoint to continue (whose mark fits one ledger only), or that names with --load the
    --save of the folder's run. Where the folder was not named by the user, the run's own or the first free one of
    NAME, NAME-2, ... is taken. Raises ConfigError where it was named, and is another run's.
    """
    flags = resolved.config.checkpoint
    wanted = Path(str(resolved.config.track.output_dir))
    folder = wanted
    if resolved.sources["output_dir"].startswith("derived"):
        candidates = (wanted if n == 1 else wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(1))
        taken = list(itertools.takewhile(lambda path: (path / "config.json").exists(), candidates))
        free = wanted.with_name(f"{wanted.name}-{len(taken) + 1}") if taken else wanted
        folder = next((path for path in taken if _is_of(path, flags)), free)
    elif (wanted / "metrics.jsonl").exists() and not (_has_checkpoint(flags) or _is_of(wanted, flags)):
        raise ConfigError(f"--output-dir {wanted} already holds a run; resume it with --load, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output-dir {folder} cannot be made: {error.strerror}; name another folder") from error
    return folder


def say_changed_flags(folder: Path, resolved: Resolved) -> None:
    """Log the flags in which a run that goes on differs from what its folder says of it until now."""
    if not (folder / "config.json").exists():
        return
    sections = json.loads(resolved.to_json())["config"].values()
    changed = different_flags(flags_of(folder), {name: value for flags in sections for name, value in flags.items()})
    if changed:
        said = "; ".join(f"{flag} was {before}, is {now}" for flag, (before, now) in changed.items())
        logger.info("flags that are not as they were in this folder: %s", said)


def _has_checkpoint(flags: CheckpointFlags) -> bool:
    """Whether --load finds something to continue."""
    folder = continued(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    return folder is not None and (flags.ckpt_step is not None or (folder / TRACKER).exists())


def _is_of(folder: Path, flags: CheckpointFlags) -> bool:
    """Whether the run in `folder` saves to where this one loads from."""
    path = folder / "config.json"
    if flags.load is None or not path.exists():
        return False
    saved = json.loads(path.read_text())["config"]["checkpoint"]["save"]
    return saved is not None and Path(saved).resolve() == Path(flags.load).resolve()


@contextlib.contextmanager
def _recorded(observer: Observer, found: Sequence[Diagnosis], **facts: object) -> Generator[None]:
    """Write the start of a run, what the preflight found, and how it ended to `events.jsonl`.

    A killed run has a start without an end.
    """
    observer.notify("start", version=__version__, process=os.getpid(), **facts)
    for finding in found:
        observer.notify("diagnosis", **finding.record())
    try:
        yield
    except DiagnosisError as error:
        observer.notify("stopped", message=str(error))
        raise
    except BaseException as error:
        said = str(error) or ("Ctrl-C" if isinstance(error, KeyboardInterrupt) else "")
        observer.notify("failed", error=type(error).__name__, message=said)
        raise
    else:
        observer.notify("end")


@contextlib.contextmanager
def _explained(resolved: Resolved, folder: Path) -> Generator[MemoryAccount]:
    """Add to an error that ends the run what it looks like (`doctor.postmortem`), as notes that are shown after it.

    The account that it gives is to note what this process has before anything of the run is built.
    """
    from furlong.doctor.postmortem.memory import MemoryAccount

    memory = MemoryAccount(resolved.config)
    try:
        yield memory
    except DiagnosisError:
        raise
    except Exception as error:
        from furlong.config.view import Args
        from furlong.doctor.postmortem.failure import explain
        from furlong.doctor.postmortem.folder import record_failure

        try:
            found, last_words = explain(error, folder, Args(resolved.config).as_dict(), after_memory=memory.facts)
            record_failure(folder, error, found)
        except Exception as failure:  # shutdown boundary: what ended the run matters more
            logger.warning("[CHECK01] the error could not be explained", exc_info=failure)
            raise error from None
        for note in [*(diagnosis.text() for diagnosis in found), *(["\n".join(last_words)] if last_words else [])]:
            error.add_note(note)
        raise


@contextlib.contextmanager
def threads_heard(observer: Observer) -> Generator[None]:
    """Say when a thread ends with an exception that nobody waits for, such as a user's own worker."""
    before = threading.excepthook

    def hear(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "a thread"
        if args.exc_type is SystemExit:
            return
        logger.error("thread %s ended", name, exc_info=args.exc_value)
        observer.notify(
            "worker_died", worker=f"thread {name}", error=args.exc_type.__name__, message=str(args.exc_value)
        )

    threading.excepthook = hear
    try:
        yield
    finally:
        threading.excepthook = before


@contextlib.contextmanager
def _traced(folder: Path, *, wanted: bool) -> Generator[None]:
    """Trace this process and those that it starts, and make one file of it all at the end, however the run ends."""
    if not wanted:
        yield
        return
    parts, target = (folder / "trace").resolve(), folder / "trace.json"
    os.environ[trace.FOLDER] = str(parts)
    trace.tracer.start(parts, "driver", place=0)
    try:
        yield
    finally:
        del os.environ[trace.FOLDER]
        trace.tracer.stop()
        logger.info("trace of %d events: %s (open it in ui.perfetto.dev)", trace.merge(parts, target), target)


def as_before(threads: Threads, flags: CheckpointFlags) -> Threads:
    """The threads of the run that this one continues, where nobody asked for a number: sums stay in the same order."""
    folder = continued(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if threads.is_given or folder is None:
        return threads
    count = threads_of(folder, step=flags.ckpt_step)
    return threads if count is None else Threads(count, f"as in {flags.load}, which is continued", is_given=True)


def set_threads(threads: Threads) -> Threads:
    """Apply the choice to PyTorch's pools; several threads that nobody asked for have to pay in a short trial."""
    import torch

    if threads.count > 1 and not threads.is_given:
        one, several = (_small_products_s(count) for count in (1, threads.count))
        if several > MIN_GAIN * one:
            threads = Threads(
                1, f"{threads.reason}; {threads.count} threads take {several / one:.2f} of the time of one"
            )
    torch.set_num_threads(threads.count)
    return threads


def _small_products_s(num_threads: int) -> float:
    """Seconds of products of the size of a tiny model's layers, where threads cost most; the best of several tries."""
    import torch

    torch.set_num_threads(num_threads)
    x, weight = torch.ones(256, 256), torch.ones(768, 256)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.silu(torch.nn.functional.linear(x, weight))
        best = min(best, time.perf_counter() - started)
    return best


def _terminal_handler(*, is_verbose: bool) -> logging.Handler:
    """Log to stderr. On a terminal, beside the progress bar and without what repeats at every step."""
    console = Console(stderr=True)
    if not console.is_terminal:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(LOG_FORMAT, datefmt="%H:%M:%S"))
        return handler
    handler = RichHandler(console=console, show_path=False, show_level=False, rich_tracebacks=False)
    handler.setFormatter(logging.Formatter("%(message)s", datefmt="%H:%M:%S"))
    if not is_verbose:
        handler.addFilter(lambda r: r.levelno > logging.INFO or not r.name.startswith("furlong.sync"))
    return handler


def collect_rarely(config: Config) -> None:
    """Have the next garbage collection wait until there are about as many new objects as a rollout has.

    A rollout makes some hundred objects a sample that live until its end; going over them at every 700th new one, which
    is Python's default, takes half of the driver's time. Small rollouts keep small numbers: garbage in cycles may hold
    tensors, which count as one object each.
    """
    num_samples = config.data.rollout_batch_size * config.data.n_samples_per_prompt
    gc.set_threshold(min(max(YOUNG_OBJECTS, OBJECTS_A_SAMPLE * num_samples), MOST_OBJECTS), 10, 10)


@contextlib.contextmanager
def _logging(level: str, path: Path) -> Generator[None]:
    """Send furlong's log to the terminal and to the run's log file, which belongs to this process until the end.

    An error's traceback goes to the file; the terminal gets its message from the command, in one place.
    """
    wanted = "DEBUG" if os.environ.get("FURLONG_DEBUG") == "1" or os.environ.get("SLIME_DEBUG") == "1" else level
    with contextlib.closing(_RunLog(path)) as to_file:
        assert to_file.stream is not None
        _take(path.parent, to_file.stream.fileno())
        to_file.setFormatter(logging.Formatter(LOG_FORMAT, datefmt="%H:%M:%S"))
        handlers: list[logging.Handler] = [_terminal_handler(is_verbose=wanted == "DEBUG"), to_file]
        for handler in handlers:
            logger.addHandler(handler)
        logger.setLevel(wanted)
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            logger.removeHandler(handlers[0])
            logger.error("the run ended with %s", type(error).__name__, exc_info=error)
            raise
        finally:
            for handler in handlers:
                logger.removeHandler(handler)
                handler.close()


class _RunLog(logging.FileHandler):
    """The run's log file. Where its disk is full the run goes on, and that is said once, on the terminal."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._is_broken = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Say why lines are lost, the first time."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_broken:
            self._is_broken = True
            logger.warning("%s could not be written (%s); lines of it are lost", self.baseFilename, error)

    def close(self) -> None:
        """Close the file; what it could not take is lost, as was said."""
        with contextlib.suppress(OSError):
            super().close()


def _take(folder: Path, handle: int) -> None:
    """Lock an open file of the run's folder for the life of this process. Raises ConfigError if another one has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"--output-dir {folder} belongs to a run that is going on; wait for it, end it, or name another folder"
        ) from None
