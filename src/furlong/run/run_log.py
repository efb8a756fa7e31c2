"""The log of a run: on the terminal and in `run.log`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Generator
from pathlib import Path

from rich.logging import RichHandler

from furlong.machine import LOG_FORMAT
from furlong.run.run_folder import lock_file
from furlong.tracking.console import terminal

logger = logging.getLogger("furlong")

EVERY_STEP = (
    "furlong.weight_sync",
    "furlong.loop.device_sharing",
)  # loggers that write at every step: to the file only, not to a terminal


@contextlib.contextmanager
def log_run(level: str, path: Path) -> Generator[None]:
    """Log to the terminal and to the run's log file, which stays locked by this process.

    Tracebacks of errors are written to the file only; the command prints the message.
    """
    level = "DEBUG" if os.environ.get("FURLONG_DEBUG") == "1" or os.environ.get("SLIME_DEBUG") == "1" else level
    with contextlib.closing(_RunLog(path)) as to_file:
        assert to_file.stream is not None
        lock_file(path.parent, to_file.stream.fileno())
        to_file.setFormatter(logging.Formatter(LOG_FORMAT, datefmt="%H:%M:%S"))
        handlers: list[logging.Handler] = [_terminal_handler(is_verbose=level == "DEBUG"), to_file]
        for handler in handlers:
            logger.addHandler(handler)
        logger.setLevel(level)
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


def _terminal_handler(*, is_verbose: bool) -> logging.Handler:
    """Return a handler for stderr; on a terminal, it works with the progress bar and omits messages of every step."""
    console = terminal()
    if not console.is_terminal:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(LOG_FORMAT, datefmt="%H:%M:%S"))
        return handler
    handler = RichHandler(console=console, show_path=False, show_level=False, rich_tracebacks=False)
    handler.setFormatter(_LevelFirst("%(message)s", datefmt="%H:%M:%S"))
    if not is_verbose:
        handler.addFilter(lambda r: r.levelno > logging.INFO or not r.name.startswith(EVERY_STEP))
    return handler


class _LevelFirst(logging.Formatter):
    """Prefixes warnings and errors with their level."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the message."""
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class _RunLog(logging.FileHandler):
    """The run's log file. If it cannot be written (full disk), the run continues after one warning."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
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
