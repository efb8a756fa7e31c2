"""Records of how a run ended: events, notes on errors, and the trace."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from furlong import __version__
from furlong.config.command_line import Resolved
from furlong.core import tracing
from furlong.core.catalogue import Diagnosis
from furlong.errors import DiagnosisError

if TYPE_CHECKING:
    from furlong.diagnosis.postmortem.out_of_memory import OutOfMemoryReport
    from furlong.interfaces import Observer

logger = logging.getLogger("furlong")


class TerminatedError(Exception):
    """The run was ended from outside; the message is "SIGTERM" or "Ctrl-C"."""


@contextlib.contextmanager
def record_outcome(observer: Observer, found: Sequence[Diagnosis], **facts: object) -> Generator[None]:
    """Record the start of a run, the findings of the preflight and the outcome in `events.jsonl`.

    A killed run has a start without an outcome.
    """
    observer.notify("start", version=__version__, process=os.getpid(), **facts)
    for finding in found:
        observer.notify("diagnosis", **finding.record())
    try:
        yield
    except DiagnosisError as error:
        observer.notify("stopped", message=str(error))
        raise
    except KeyboardInterrupt:
        observer.notify("stopped", message="by Ctrl-C")
        raise
    except TerminatedError as error:
        observer.notify("stopped", message=f"by {error}")
        raise
    except BaseException as error:
        observer.notify("failed", error=type(error).__name__, message=str(error))
        raise
    else:
        observer.notify("end")


@contextlib.contextmanager
def record_thread_errors(observer: Observer) -> Generator[None]:
    """Log and record exceptions that end a thread, such as one started by user code."""
    before = threading.excepthook

    def report(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "a thread"
        if args.exc_type is SystemExit:
            return
        logger.error("thread %s ended", name, exc_info=args.exc_value)
        observer.notify(
            "worker_died", worker=f"thread {name}", error=args.exc_type.__name__, message=str(args.exc_value)
        )

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


@contextlib.contextmanager
def explain_errors(resolved: Resolved, folder: Path) -> Generator[OutOfMemoryReport]:
    """Add a post-mortem diagnosis (`diagnosis.postmortem`) as notes to an error that ends the run.

    Yields the memory report; record its baseline before the run allocates memory.
    """
    from furlong.diagnosis.postmortem.out_of_memory import OutOfMemoryReport

    memory = OutOfMemoryReport(resolved.config)
    try:
        yield memory
    except DiagnosisError:
        raise
    except Exception as error:
        from furlong.config.args_view import Args
        from furlong.diagnosis.postmortem.run_examination import explain, record_failure

        try:
            found, last_words = explain(error, folder, Args(resolved.config).as_dict(), after_memory=memory.facts)
            record_failure(folder, error, found)
        except Exception as failure:  # shutdown boundary: the original error matters more
            logger.warning("[CHECK01] the error could not be explained", exc_info=failure)
            raise error from None
        for note in [*(diagnosis.text() for diagnosis in found), *(["\n".join(last_words)] if last_words else [])]:
            error.add_note(note)
        raise


@contextlib.contextmanager
def trace_processes(folder: Path, *, enabled: bool) -> Generator[None]:
    """Trace this process and its child processes; merges their files into `trace.json` when the context ends."""
    if not enabled:
        yield
        return
    parts, target = (folder / "trace").resolve(), folder / "trace.json"
    os.environ[tracing.FOLDER] = str(parts)
    tracing.tracer.start(parts, "driver", place=0)
    try:
        yield
    finally:
        del os.environ[tracing.FOLDER]
        tracing.tracer.stop()
        logger.info("trace of %d events: %s (open it in ui.perfetto.dev)", tracing.merge(parts, target), target)
