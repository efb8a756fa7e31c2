"""What is kept of how a run went: its events, what an error that ended it looks like, a trace."""

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
from furlong.core import trace
from furlong.core.catalogue import Diagnosis
from furlong.errors import DiagnosisError

if TYPE_CHECKING:
    from furlong.diagnosis.postmortem.out_of_memory import OutOfMemoryReport
    from furlong.interfaces import Observer

logger = logging.getLogger("furlong")


class TerminatedError(Exception):
    """Something outside of the run ended it; the message is "SIGTERM" or "Ctrl-C"."""


@contextlib.contextmanager
def recorded(observer: Observer, found: Sequence[Diagnosis], **facts: object) -> Generator[None]:
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
def explained(resolved: Resolved, folder: Path) -> Generator[OutOfMemoryReport]:
    """Add to an error that ends the run what it looks like (`diagnosis.postmortem`), as notes that are shown after it.

    The account that it gives is to note what this process has before anything of the run is built.
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
        except Exception as failure:  # shutdown boundary: what ended the run matters more
            logger.warning("[CHECK01] the error could not be explained", exc_info=failure)
            raise error from None
        for note in [*(diagnosis.text() for diagnosis in found), *(["\n".join(last_words)] if last_words else [])]:
            error.add_note(note)
        raise


@contextlib.contextmanager
def traced(folder: Path, *, wanted: bool) -> Generator[None]:
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
