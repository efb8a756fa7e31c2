"""Launch of a run: preflight, run directory, training loop and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.catalogue import Diagnosis, Problem
from furlong.config.command_line import Resolved
from furlong.config.sections import CheckpointFlags, Config
from furlong.core.forked_processes import forks_leave_loop
from furlong.core.garbage import import_without_gc, raise_gc_threshold
from furlong.core.process_guard import process_guard
from furlong.core.user_code import before_exit, exits_fail_the_run
from furlong.core.user_processes import ending_user_processes
from furlong.errors import ConfigError, DiagnosisError, FurlongError, HookError, TerminatedError
from furlong.files.checkpoint_folder import find_complete_folders, find_resume_folder, saved_num_threads
from furlong.machine import (
    Threads,
    choose_threads,
    deterministic_kernels,
    disable_nccl_cumem,
    limit_malloc_arenas,
    set_threads,
)
from furlong.run.checks import findings_before_run
from furlong.run.end_signals import EXIT_CODES, EndSignals, Reason
from furlong.run.run_folder import lock_save_folder, log_changed_flags, run_folder, write_config
from furlong.run.run_records import (
    explain_errors,
    log_run,
    record_outcome,
    record_thread_errors,
    trace_processes,
)
from furlong.run.witness import witnessed
from furlong.tracking.run_files import CONFIG, EVENTS, METRICS, RUN_LOG, RUN_STARTS, EventLog

if TYPE_CHECKING:
    from furlong.diagnosis.hang_watchdog import HangWatchdog
    from furlong.wiring.build import Built

logger = logging.getLogger("furlong")


class Interrupt:
    """Ends a run from another thread, as Ctrl-C and SIGTERM do in the main thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: Reason | None = None
        self._end: Callable[[Reason], object] = lambda _: None

    def attach(self, end: Callable[[Reason], object]) -> None:
        """Call `end(reason)` when `request` is called, or at once if it was called before."""
        with self._lock:
            self._end = end
            if self._reason is not None:
                end(self._reason)

    def request(self, reason: Reason) -> None:
        """Ask the run to end. Callable from any thread."""
        with self._lock:
            self._reason = reason
            self._end(reason)


def run(resolved: Resolved, problems: Sequence[Problem] = (), *, owns_process: bool = False) -> int:
    """Check the configuration, create the run directory and train; returns the number of rollouts trained.

    `problems` are those of reading the flags. Raises ConfigError with all of them and with every error of the preflight
    before anything is written; SystemExit with code 143 after SIGTERM has ended the run. `owns_process`: nothing but
    the run starts processes in this process, so that those which are left are killed at its end.
    """
    findings = check_before_run(resolved, problems)
    return run_in_folder(run_folder(resolved), resolved, findings, owns_process=owns_process)


def check_before_run(resolved: Resolved, problems: Sequence[Problem] = ()) -> list[Diagnosis]:
    """Return the warnings and notes of the preflight. Raises ConfigError with its errors and `problems`."""
    findings = findings_before_run(resolved, problems)
    if errors := [finding.text() for finding in findings if finding.severity == "error"]:
        raise ConfigError(*errors)
    return findings


def run_in_folder(
    folder: Path,
    resolved: Resolved,
    findings: Sequence[Diagnosis],
    interrupt: Interrupt | None = None,
    *,
    owns_process: bool = False,
) -> int:
    """Train in an existing folder; returns the number of rollouts trained. `interrupt` ends the run early."""
    config = resolved.config
    disable_nccl_cumem()
    limit_malloc_arenas()
    fixed = deterministic_kernels() if config.train.deterministic_mode else contextlib.nullcontext()
    saving = lock_save_folder(config.checkpoint.save)
    ending = ending_user_processes() if owns_process else contextlib.nullcontext()
    beside = _witnessed(folder / RUN_LOG) if owns_process else contextlib.nullcontext()
    logging_run = log_run(config.track.log_level, folder / RUN_LOG)
    with process_guard.blaming(), logging_run, beside, ending, saving, fixed:
        is_async = bool(config.rollout.async_buffer_size)
        log_changed_flags(folder, resolved)
        if not ((folder / CONFIG).exists() and (folder / METRICS).exists()):
            write_config(folder, resolved)  # the one of recorded steps is kept until this run continues from them
        # processes read the trace directory when they are created
        with explain_errors(resolved, folder) as memory, trace_processes(folder, enabled=config.debug.trace):
            with import_without_gc("furlong.wiring.build"):
                raise_gc_threshold(config.data.rollout_batch_size * config.data.n_samples_per_prompt)
                chosen = choose_threads(config.cluster.num_threads, num_parts=2 if is_async else 1)
                threads = set_threads(_resume_thread_count(chosen, config.checkpoint))
                from furlong.run.device_sizes import sized_for_device  # after the threads are set: they import torch
                from furlong.wiring.build import build

            resolved = sized_for_device(resolved)
            config = resolved.config

            memory.record_baseline()
            count = f"{threads.count} thread{'s' * (threads.count != 1)}"
            logger.info("%s %s; %s: %s", RUN_STARTS, folder, count, threads.reason)
            if config.checkpoint.save is None and config.data.num_rollout != 0 and not config.debug.debug_rollout_only:
                logger.info("weights are not saved: --save DIR writes checkpoints, --save-hf Hugging Face models")
            for line in resolved.lines:
                logger.info("%s", line)
            for finding in findings:
                level = logging.WARNING if finding.severity == "warning" else logging.INFO
                logger.log(level, "%s", finding.text())
            with process_guard.watching(each_call=True), _building_watchdog(folder, resolved):
                built = build(resolved, folder)
            with process_guard.watching():
                return _run_built(built, resolved, folder, findings, threads, interrupt or Interrupt())


@contextlib.contextmanager
def _witnessed(log: Path) -> Generator[None]:
    """Have a process beside the run that reports a sudden end with the user code that was called last."""
    with witnessed(log, before_exit) as process_guard.note:
        try:
            yield
        finally:
            process_guard.note = None


def _resume_thread_count(threads: Threads, flags: CheckpointFlags) -> Threads:
    """Return the thread count of the resumed run, unless --num-threads is given, so that sums keep their order."""
    folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if threads.is_given or folder is None:
        return threads
    count = saved_num_threads(folder, step=flags.ckpt_step)
    return threads if count is None else Threads(count, f"as in {flags.load}, which is resumed", is_given=True)


class _BuildObserver:
    """Records what the watchdog reports before the run has an observer."""

    stop_requested = False

    def __init__(self, events: Path) -> None:
        self._events = events

    def notify(self, event: str, **fields: Any) -> None:
        """Record the event, and log a hang."""
        if event == "hang":
            logger.error("no progress for %s s while the run is built: %s; all stack traces are in %s",
                         fields["seconds"], fields["doing"], fields["report"])  # fmt: skip
        with contextlib.closing(EventLog(self._events)) as log:
            log.write(event, **fields)


def _building_watchdog(folder: Path, resolved: Resolved) -> HangWatchdog:
    """Return the watchdog of user code that is called while the parts of the run are built."""
    from furlong.diagnosis.hang_watchdog import HangWatchdog

    fault = resolved.config.fault
    return HangWatchdog(
        folder,
        seconds=fault.hang_timeout,
        observer=_BuildObserver(folder / EVENTS),
        stops="warn" if fault.on_hang == "warn" else "stop-user-code",  # loading a large model makes no progress either
        grace_s=0,
    )


def _run_built(
    built: Built,
    resolved: Resolved,
    folder: Path,
    findings: Sequence[Diagnosis],
    threads: Threads,
    interrupt: Interrupt,
) -> int:
    """Run the loop under the hang watchdog and record the outcome; closes the files in any case."""
    from furlong.diagnosis.hang_watchdog import HangWatchdog
    from furlong.diagnosis.memory_watchdog import MemoryWatchdog

    fault = resolved.config.fault
    hang = HangWatchdog(
        folder,
        seconds=fault.hang_timeout,
        observer=built.watch,
        stops=fault.on_hang,
        depths=built.queues,
        stacks=built.parts.trainer.stack_traces,
    )
    try:
        with (
            record_outcome(built.watch, findings, threads=threads.count),
            record_thread_errors(built.watch),
            hang,
            MemoryWatchdog(reserve=fault.hook_memory_reserve, observer=built.watch),
            exits_fail_the_run(),
            EndSignals() as signals,
        ):
            started = time.monotonic()
            begin = partial(write_config, folder, resolved)
            step = asyncio.run(_driven(built, hang, (signals, interrupt), on_start=begin))
            logger.info("the run ended after step %d, in %.0f s: %s", step, time.monotonic() - started, folder)
            return step
    except TerminatedError as error:
        logger.warning("ended by %s; %s", error, _resume_hint(resolved.config))
        code = next(code for reason, code in EXIT_CODES.items() if reason == str(error))
        raise (KeyboardInterrupt() if str(error) == "Ctrl-C" else SystemExit(code)) from None
    except KeyboardInterrupt:
        logger.warning("ended by Ctrl-C; %s", _resume_hint(resolved.config))
        raise
    finally:
        built.close_files()


def _resume_hint(config: Config) -> str:
    """Return how to continue a run that was interrupted."""
    save = config.checkpoint.save
    if save is None:
        return "no weights were saved, as --save was not given"
    if not find_complete_folders(Path(save)):
        return (
            f"no checkpoint was written yet (--save-interval is {config.checkpoint.save_interval} rollouts); the same "
            "command starts from the beginning"
        )
    return f"resume from the last checkpoint with the same command and --load {save}"


class _EarlyEnd:
    """Cancels the loop's task at a signal or when a trainer process is lost, and knows why it was cancelled."""

    def __init__(self, built: Built, task: asyncio.Task[Any]) -> None:
        self._built, self._task = built, task
        self._reason: Reason | None = None
        self._lost: FurlongError | None = None
        self.is_closing = False

    def request(self, reason: Reason) -> None:
        """Cancel the loop, once: a second cancel would interrupt the end that the first one began."""
        if self.is_closing:
            logger.warning("%s: the run is closing already", reason)
        elif self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def watch_trainer(self) -> None:
        """Cancel the loop when a trainer process is lost."""
        self._lost = await self._built.parts.trainer.wait_for_failure()
        self._task.cancel()

    def error(self) -> BaseException | None:
        """Return what cancelled the loop: a signal, a lost trainer process, a diagnosis; None for anything else."""
        if self._reason is not None:
            return TerminatedError(self._reason)
        if self._lost is not None:
            return self._lost
        if (diagnosis := self._built.watch.ended_by) is not None:
            return DiagnosisError(f"the run was stopped while it waited:\n{diagnosis.text()}")
        return None


async def _driven(
    built: Built, hang: HangWatchdog, ends: Sequence[EndSignals | Interrupt], *, on_start: Callable[[], None]
) -> int:
    """`_drive`, with the event loop protected from what user code does to it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("task") is not task:  # the run's own error is raised, also if user code stopped the loop
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
    with forks_leave_loop(loop):
        return await _drive(built, hang, ends, on_start=on_start)


async def _drive(
    built: Built, hang: HangWatchdog, ends: Sequence[EndSignals | Interrupt], *, on_start: Callable[[], None]
) -> int:
    """Run the loop and close its parts in any case. `on_start` is called once everything is restored, before a step.

    Raises TerminatedError if one of `ends` did, DiagnosisError if a diagnosis did, the trainer's error if one
    of its processes is gone.
    """
    from furlong.loop.train import train

    task = asyncio.current_task()
    assert task is not None
    hang.attach(task)
    early = _EarlyEnd(built, task)
    watching: list[asyncio.Task[None]] = []

    def begin() -> None:
        on_start()
        built.ledger.begin()
        built.checkpoints.record_changes(built.parts)

    loop = asyncio.get_running_loop()
    for each in ends:
        each.attach(lambda reason: loop.call_soon_threadsafe(early.request, reason))
    try:
        await built.start()
        watching.append(asyncio.create_task(early.watch_trainer()))
        step = await train(built.parts, built.schedule, built.checkpoints, on_start=begin)
        if not step:  # only evaluated
            built.ledger.begin()
        if (diagnosis := built.watch.ended_by) is not None:
            raise DiagnosisError(f"--on-diagnosis ended the run after step {step}:\n{diagnosis.text()}")
        return step
    except asyncio.CancelledError:
        if (error := early.error()) is not None:
            raise error from None
        if caller := process_guard.last_called():
            raise HookError(f"user code cancelled the task of the run; {caller} was called last") from None
        raise
    finally:
        early.is_closing = True  # a signal from now on would replace the error that ended the run, and so would a hang
        hang.begin_close()
        for watcher in watching:
            watcher.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        try:
            await built.close()
        finally:
            for each in ends:  # the loop is about to close
                each.attach(lambda _: None)
