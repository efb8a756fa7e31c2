"""Launch of a run: preflight, run directory, training loop and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.catalogue import Diagnosis, Problem, diagnosis, most_severe_first
from furlong.cluster.ray_session import check_fits, cluster_nodes
from furlong.config.checks.engine_checks import device_problems
from furlong.config.command_line import Resolved
from furlong.config.facts import gets_random_key, is_served, is_started, model_folder, without_engines
from furlong.config.sections import CheckpointFlags, Config
from furlong.config.topology import Topology, uses_ray
from furlong.core.garbage import import_without_gc, raise_gc_threshold
from furlong.core.model_config import read_json
from furlong.core.progress import progress
from furlong.core.user_code import describe_exception, passes, place_of, with_hook_errors
from furlong.diagnosis.preflight import preflight
from furlong.diagnosis.preflight.flag_checks import from_problem
from furlong.errors import (
    ClusterError,
    ConfigError,
    DiagnosisError,
    EndedBySignal,
    FurlongError,
    HookError,
    TerminatedError,
)
from furlong.files.atomic import write_atomically
from furlong.files.checkpoint_folder import find_complete_folders, find_resume_folder, saved_num_threads
from furlong.machine import (
    Threads,
    choose_threads,
    deterministic_kernels,
    disable_nccl_cumem,
    keep_compile_caches,
    limit_malloc_arenas,
    set_threads,
)
from furlong.run.folder import folder_problems, lock_save_folder, log_changed_flags, run_folder, write_config
from furlong.run.records import explain_errors, log_run, record_outcome, trace_processes
from furlong.run.signals import EXIT_CODES, EndSignals, Reason
from furlong.tools.chosen_sizes import engine_advice, with_chosen_sizes
from furlong.tools.gpu_memory import local_device, type_bytes
from furlong.tracking.console import duration, show_progress
from furlong.tracking.run_files import CONFIG, METRICS, RUN_LOG, RUN_STARTS

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


def run(resolved: Resolved, problems: Sequence[Problem] = ()) -> int:
    """Check the configuration, create the run directory and train; returns the number of rollouts trained.

    `problems` are those of reading the flags. Raises ConfigError with all of them and with every error of the preflight
    before anything is written; SystemExit with code 143 after SIGTERM has ended the run.
    """
    with show_progress():
        with progress.phase("checking the command"):
            findings = check_before_run(resolved, problems)
        return run_in_folder(run_folder(resolved), resolved, findings)


def findings_before_run(resolved: Resolved, problems: Sequence[Problem] = ()) -> list[Diagnosis]:
    """Return the diagnoses of a command, most severe first. `problems` are those of reading its flags."""
    findings = preflight(resolved.config, [*problems, *folder_problems(resolved)], sources=resolved.sources)
    if any(finding.id == "GPU05" for finding in findings):  # there is no cluster to ask
        return findings
    return most_severe_first([*findings, *_cluster_findings(resolved.config)])


def _cluster_findings(config: Config) -> Iterator[Diagnosis]:
    """GPU05, GPU01 and CFG05: the cluster at --ray-address, its slots, and flags that depend on its machines."""
    address = config.cluster.ray_address
    if address is None or ":" not in address or not uses_ray(config):
        return  # `auto`: Ray looks for a cluster on this machine when the run starts
    try:
        nodes, resource = cluster_nodes(address)
    except ClusterError as error:
        finding, _, remedy = str(error).rpartition("; ")
        yield diagnosis("GPU05", finding, cause="", remedy=remedy, evidence={"address": address})
        return
    topology = Topology.of(config)
    try:
        check_fits(topology, nodes, resource)
    except ConfigError as error:
        finding, _, remedy = str(error).partition("; ")
        evidence = {"needed": topology.num_gpus, "nodes": [str(node) for node in nodes]}
        yield diagnosis("GPU01", finding, remedy=remedy, evidence=evidence)
    for problem in device_problems(config, "cuda" if resource == "GPU" else "cpu"):
        yield from_problem(problem, {"address": address})
    if is_started(config) and not gets_random_key(config) and not without_engines(config):
        from furlong.inference.supervisor.launch import key_problem  # imports torch

        keys = (key_problem(config.cluster.sglang_api_key, "an engine", node.address) for node in nodes)
        if problem := next(filter(None, keys), None):
            yield from_problem(problem, {"address": address})


def check_before_run(resolved: Resolved, problems: Sequence[Problem] = ()) -> list[Diagnosis]:
    """Return the warnings and notes of the preflight. Raises ConfigError with its errors and `problems`."""
    findings = findings_before_run(resolved, problems)
    if errors := [finding.text() for finding in findings if finding.severity == "error"]:
        raise ConfigError(*errors)
    return findings


class StepCallback:
    """Calls the `on_step` of `furlong.train` with each record; the run ends after a step for which it returns False."""

    def __init__(self, function: Callable[[dict[str, Any]], object], stop: Callable[[], None]) -> None:
        self._function, self._stop = with_hook_errors(function, "on_step"), stop

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Call the function. Raises HookError with what it raises."""
        if self._function({"step": step, **metrics}) is False:
            self._stop()

    def close(self) -> None:
        """Keep nothing."""


def run_in_folder(
    folder: Path,
    resolved: Resolved,
    findings: Sequence[Diagnosis],
    interrupt: Interrupt | None = None,
    *,
    on_step: Callable[[dict[str, Any]], object] | None = None,
) -> int:
    """Train in an existing folder; returns the number of rollouts trained. `interrupt` ends the run early.

    on_step: called with each step's record; see `StepCallback`.
    """
    config = resolved.config
    disable_nccl_cumem()
    keep_compile_caches(config.cluster.compile_cache_dir)
    limit_malloc_arenas()
    fixed = deterministic_kernels() if config.train.deterministic_mode else contextlib.nullcontext()
    with (
        log_run(config.track.log_level, folder / RUN_LOG),
        lock_save_folder(config.checkpoint.save),
        fixed,
        show_progress(),
    ):
        log_changed_flags(folder, resolved)
        if not ((folder / CONFIG).exists() and (folder / METRICS).exists()):
            write_config(folder, resolved)  # the one of recorded steps is kept until this run continues from them
        # processes read the trace directory when they are created
        with explain_errors(resolved, folder) as memory, trace_processes(folder, enabled=config.debug.trace):
            with progress.phase("importing PyTorch"), import_without_gc("furlong.wiring.build"):
                raise_gc_threshold(config.data.rollout_batch_size * config.data.n_samples_per_prompt)
                num_parts = 2 if config.rollout.async_buffer_size else 1
                chosen = choose_threads(config.cluster.num_threads, num_parts=num_parts)
                threads = set_threads(_resume_thread_count(chosen, config.checkpoint))
                # after the threads are set: they import torch
                from furlong.diagnosis.hang_watchdog import HangWatchdog
                from furlong.wiring.build import build
            resolved = sized_for_gpus(resolved)
            memory.record_baseline()
            _log_start(folder, resolved, findings, threads)
            fault = resolved.config.fault
            with HangWatchdog(folder, seconds=fault.hang_timeout, stops=fault.on_hang) as hang:
                with progress.phase("loading the model and the data"):
                    built = build(resolved, folder)
                if on_step is not None:
                    trackers = [*built.parts.trackers, StepCallback(on_step, built.watch.stop)]
                    built = replace(built, parts=replace(built.parts, trackers=trackers))
                hang.observe(built.watch, depths=built.queues, stacks=built.parts.trainer.stack_traces)
                try:
                    with record_outcome(built.watch, findings, threads=threads.count), EndSignals() as signals:
                        return _run_loop(built, resolved, folder, hang, (signals, interrupt or Interrupt()))
                except TerminatedError as error:
                    logger.warning("ended by %s; %s", error, _resume_hint(resolved.config))
                    code = next(code for reason, code in EXIT_CODES.items() if reason == str(error))
                    raise (KeyboardInterrupt() if str(error) == "Ctrl-C" else SystemExit(code)) from None
                except KeyboardInterrupt:
                    logger.warning("ended by Ctrl-C; %s", _resume_hint(resolved.config))
                    raise
                finally:
                    built.close_files()


def sized_for_gpus(resolved: Resolved) -> Resolved:
    """Return a copy with the sizes that the memory plan chooses, and with a line of the log for each, or for why not.

    Flags take precedence.
    """
    config, sources, lines = resolved.config, resolved.sources, list[str]()
    size, why = gpu_bytes(config)
    try:
        if size:
            model_config = read_json(Path(str(config.rollout.hf_checkpoint)) / "config.json")
            config, sources, lines = with_chosen_sizes(config, sources, model_config, size)
    except ConfigError as error:
        why = str(error)
    if why:
        line = f"micro-batches and engines keep their default sizes, as the memory plan cannot choose them: {why}"
        return replace(resolved, lines=(*resolved.lines, line))
    if config.cluster.engine == "embedded" and not is_served(config) and not without_engines(config):
        lines.append(engine_advice(config))
    return replace(resolved, config=config, sources=sources, lines=(*resolved.lines, *lines))


def gpu_bytes(config: Config) -> tuple[int, str]:
    """Return the memory of the run's smallest GPU, as far as this machine or Ray knows it, or 0 and why not."""
    address = config.cluster.ray_address
    if address is not None and ":" in address and uses_ray(config):
        try:
            nodes, resource = cluster_nodes(address)
        except ClusterError as error:
            return 0, str(error)
        if resource == "CPU":
            return 0, f"the Ray cluster at {address} has no GPU"
        if sizes := [size for node in nodes if (size := type_bytes(node.gpu_type))]:
            return min(sizes), ""
    import torch

    device = local_device() if torch.cuda.is_available() else None
    if device is None:
        return 0, "no GPU" if address is None else "the memory of the cluster's GPUs is unknown"
    if not uses_ray(config) and torch.cuda.device_count() < Topology.of(config).num_gpus:
        return 0, "trainer and engines share a GPU without --colocate"
    return device[1], ""


def _log_start(folder: Path, resolved: Resolved, findings: Sequence[Diagnosis], threads: Threads) -> None:
    config = resolved.config
    count = f"{threads.count} thread{'s' * (threads.count != 1)}"
    logger.info("%s %s; %s: %s", RUN_STARTS, folder, count, threads.reason)
    if config.data.num_rollout != 0 and not config.debug.debug_rollout_only:
        kept = model_folder(config, folder)
        if kept is not None and config.checkpoint.save is None:
            logger.info("the trained model is written to %s at the end; --save DIR also writes checkpoints", kept)
        elif config.checkpoint.save is None and config.checkpoint.save_hf is None:
            logger.info("weights are not saved: --save DIR writes checkpoints, --save-hf DIR the trained model")
    for line in resolved.lines:
        logger.info("%s", line)
    for finding in findings:
        logger.log(logging.WARNING if finding.severity == "warning" else logging.INFO, "%s", finding.text())


def _resume_thread_count(threads: Threads, flags: CheckpointFlags) -> Threads:
    """Return the thread count of the resumed run, unless --num-threads is given, so that sums keep their order."""
    folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if threads.is_given or folder is None:
        return threads
    count = saved_num_threads(folder, step=flags.ckpt_step)
    return threads if count is None else Threads(count, f"as in {flags.load}, which is resumed", is_given=True)


def _resume_hint(config: Config) -> str:
    save = config.checkpoint.save
    if save is None:
        return "no weights were saved: only --save writes checkpoints before the end of a run"
    if not find_complete_folders(Path(save)):
        return (
            f"no checkpoint was written yet (--save-interval is {config.checkpoint.save_interval} rollouts); the same "
            "command starts from the beginning"
        )
    more = "" if config.checkpoint.load == save else f", with --load {save}"
    return f"the same command{more} resumes from the last checkpoint"


def _run_loop(
    built: Built, resolved: Resolved, folder: Path, hang: HangWatchdog, ends: Sequence[EndSignals | Interrupt]
) -> int:
    """Run the event loop. What user code raises outside of the functions that flags name becomes a HookError.

    Examples are `sys.exit()` in a task that a generate function created, which ends the event loop, and an error in the
    backward pass of a loss function's own operator.
    """
    started = time.monotonic()
    try:
        step = asyncio.run(_drive(built, resolved.config, hang, ends, on_start=lambda: write_config(folder, resolved)))
    except SystemExit as error:
        if isinstance(error, EndedBySignal):
            raise
        raise HookError(f"user code ended the run: {describe_exception(error)}; raise an exception instead") from error
    except Exception as error:
        if passes(error) or not place_of(error):
            raise
        raise HookError(f"user code raised {describe_exception(error)}") from error
    logger.info("the run ended after step %d, in %.0f s: %s", step, time.monotonic() - started, folder)
    return step


@contextlib.contextmanager
def _start_of_engines(config: Config) -> Generator[None]:
    """Show the start of what `Built.start` starts, with the time that it took the last time on this machine."""
    if not is_started(config):
        with progress.phase("starting"):
            yield
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "furlong" / "engine_start_s.json"
    key = f"{config.cluster.engine} {Path(str(config.rollout.hf_checkpoint)).resolve()}"
    try:
        known = json.loads(cache.read_text())
        last_s = float(known.get(key, 0.0))
    except (OSError, ValueError, TypeError, AttributeError):  # there is none, or it is damaged
        known, last_s = {}, 0.0
    what = f"starting the engines ({config.cluster.engine})"
    logger.info("%s%s", what, f"; it took {duration(last_s)} the last time" if last_s else "")
    started = time.monotonic()
    with progress.phase(what, last_s=last_s):
        yield
    known[key] = round(time.monotonic() - started, 1)
    with contextlib.suppress(OSError):  # a home that is not writable
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache, json.dumps(known))


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


async def _drive(
    built: Built,
    config: Config,
    hang: HangWatchdog,
    ends: Sequence[EndSignals | Interrupt],
    *,
    on_start: Callable[[], None],
) -> int:
    """Run the loop and close its parts in any case. `on_start` is called once everything is restored, before a step.

    Raises TerminatedError if one of `ends` did, DiagnosisError if a diagnosis did, the trainer's error if one
    of its processes is gone.
    """
    from furlong.loop.train import train

    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    hang.attach(task)
    early = _EarlyEnd(built, task)
    watching: list[asyncio.Task[None]] = []

    def begin() -> None:
        on_start()
        built.ledger.begin()
        built.checkpoints.record_changes(built.parts)

    for each in ends:
        each.attach(lambda reason: loop.call_soon_threadsafe(early.request, reason))
    try:
        with _start_of_engines(config):
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
