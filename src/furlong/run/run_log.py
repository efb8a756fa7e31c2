"""The log of a run: on the terminal, and in a file of its folder."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Generator
from pathlib import Path

from rich.logging import RichHandler

from furlong.machine import LOG_FORMAT
from furlong.run.run_folder import take
from furlong.tracking.console import terminal

logger = logging.getLogger("furlong")

EVERY_STEP = (
    "furlong.weight_sync",
    "furlong.loop.device_sharing",
)  # whose lines go to the log's file, and not to a terminal


@contextlib.contextmanager
def logged(level: str, path: Path) -> Generator[None]:
    """Send furlong's log to the terminal and to the run's log file, which belongs to this process until the end.

    An error's traceback goes to the file; the terminal gets its message from the command, in one place.
    """
    wanted = "DEBUG" if os.environ.get("FURLONG_DEBUG") == "1" or os.environ.get("SLIME_DEBUG") == "1" else level
    with contextlib.closing(_RunLog(path)) as to_file:
        assert to_file.stream is not None
        take(path.parent, to_file.stream.fileno())
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


def _terminal_handler(*, is_verbose: bool) -> logging.Handler:
    """Log to stderr. On a terminal, beside the progress bar and without what repeats at every step."""
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
    """Begins warnings and errors with the word, where no column has the level."""

    def format(self, record: logging.LogRecord) -> str:
        """The message, and what it is if it is no information."""
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


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
