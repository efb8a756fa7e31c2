"""Records of a run: its log, events of its start and end, notes on errors, and the trace."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import ConsoleRenderable
from rich.logging import RichHandler
from rich.text import Text

from furlong.catalogue import Diagnosis
from furlong.config.command_line import Resolved
from furlong.core import tracing
from furlong.core.process_environment import log_stream
from furlong.core.text import redact_credentials
from furlong.errors import DiagnosisError, TerminatedError, failure_record
from furlong.machine import LOG_FORMAT, chosen_log_level
from furlong.run.folder import lock_file
from furlong.tracking.console import terminal
from furlong.version import __version__

if TYPE_CHECKING:
    from furlong.diagnosis.postmortem.out_of_memory import OutOfMemoryReport
    from furlong.interfaces import Observer

logger = logging.getLogger("furlong")

EVERY_STEP = (
    "furlong.weight_sync",
    "furlong.loop.device_sharing",
)  # loggers that write at every step: to the file only, not to a terminal


@contextlib.contextmanager
def log_run(level: str, path: Path) -> Generator[None]:
    """Log to the terminal and to the run's log file, which stays locked by this process.

    Tracebacks of errors are written to the file only; the command prints the message. So are the stacks of a crash in
    compiled code, where the command enabled faulthandler: `furlong doctor --run` reads them.
    """
    level = chosen_log_level(level)
    with contextlib.closing(_RunLog(path)) as to_file:
        assert to_file.stream is not None
        lock_file(path.parent, to_file.stream.fileno())
        to_file.setFormatter(_Redacting(LOG_FORMAT, datefmt="%H:%M:%S"))
        handlers: list[logging.Handler] = [_terminal_handler(is_verbose=level == "DEBUG"), to_file]
        for handler in handlers:
            logger.addHandler(handler)
        logger.setLevel(level)
        propagates = logger.propagate
        shown = [getattr(handler, "stream", None) for handler in logging.getLogger().handlers]
        if sys.stdout in shown or sys.stderr in shown:  # the program's own handler would print each line again
            logger.propagate = False
        reports_crashes = faulthandler.is_enabled()
        try:
            if reports_crashes:
                faulthandler.enable(to_file.stream)
            yield
        except (Exception, KeyboardInterrupt) as error:
            logger.removeHandler(handlers[0])
            logger.error("the run ended with %s", type(error).__name__, exc_info=error)
            raise
        finally:
            if reports_crashes:
                faulthandler.enable(2)
            logger.propagate = propagates
            for handler in handlers:
                logger.removeHandler(handler)
                handler.close()


def _terminal_handler(*, is_verbose: bool) -> logging.Handler:
    """Return a handler of `log_stream`; on a terminal, with the progress bar and without messages of every step."""
    console = terminal()
    if not console.is_terminal:
        handler = logging.StreamHandler(log_stream())
        handler.setFormatter(_Redacting(LOG_FORMAT, datefmt="%H:%M:%S"))
        return handler
    handler = _Colored(console=console, show_path=False, show_level=False, rich_tracebacks=False)
    handler.setFormatter(_LevelFirst("%(message)s", datefmt="%H:%M:%S"))
    if not is_verbose:
        handler.addFilter(lambda r: r.levelno > logging.INFO or not r.name.startswith(EVERY_STEP))
    return handler


class _Colored(RichHandler):
    """Shows warnings and errors in color."""

    def render_message(self, record: logging.LogRecord, message: str) -> ConsoleRenderable:
        """Return the message as `rich` shows it."""
        style = "red" if record.levelno >= logging.ERROR else "yellow"
        return super().render_message(record, message) if record.levelno < logging.WARNING else Text(message, style)


class _Redacting(logging.Formatter):
    """Redacts credentials in URLs."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the message and its traceback."""
        return redact_credentials(super().format(record))


class _LevelFirst(_Redacting):
    """Prefixes warnings and errors with their level."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the message."""
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class _RunLog(logging.FileHandler):
    """The run's log file. If it cannot be written (full disk), the run continues after one warning."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._is_broken = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Warn about lost lines once."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_broken:
            self._is_broken = True
            logger.warning("%s could not be written (%s); lines of it are lost", self.baseFilename, error)

    def close(self) -> None:
        """Close the file; an error has been reported by `handleError`."""
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def record_outcome(observer: Observer, findings: Sequence[Diagnosis], **facts: object) -> Generator[None]:
    """Record the start of a run, the findings of the preflight and the outcome in `events.jsonl`.

    A killed run has a start without an outcome. Exceptions that end a thread meanwhile are logged and recorded.
    """

    def record_thread_error(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            name = f"thread {args.thread.name if args.thread is not None else 'unknown'}"
            logger.error("%s ended", name, exc_info=args.exc_value)
            observer.notify("worker_died", worker=name, error=args.exc_type.__name__, message=str(args.exc_value))

    threading.excepthook, before = record_thread_error, threading.excepthook
    observer.notify("start", version=__version__, process=os.getpid(), machine=socket.gethostname(), **facts)
    for finding in findings:
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
        observer.notify("failed", **failure_record(error))
        raise
    else:
        observer.notify("end")
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
            findings, last_words = explain(error, folder, Args(resolved.config).as_dict(), after_memory=memory.facts)
            record_failure(folder, error, findings)
        except Exception as failure:  # shutdown boundary: the original error matters more
            logger.warning("[CHECK01] the error could not be explained", exc_info=failure)
            raise error from None
        for note in [*(diagnosis.text() for diagnosis in findings), *(["\n".join(last_words)] if last_words else [])]:
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
