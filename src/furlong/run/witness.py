"""A small process beside a run that says so when the run's process ends without a word, or ends it if SIGTERM cannot.

Compiled code can call `_exit(0)`: no line of Python runs after that, and the exit code looks like success. It can also
keep the interpreter lock: no signal is handled then. Only another process sees both.

Run as a script, without furlong or site-packages: `python -S -E witness.py PROCESS LOG SECONDS`. stdin is a pipe from
the run, of one-byte messages: PULSE once a second, the number of each signal that arrives, and END.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

logger = logging.getLogger(__name__)

PULSE, END, SIGTERM = b"\0", b"\xff", bytes([signal.SIGTERM])
PULSE_S = 1.0
ANSWER_S = 20.0  # without a pulse, after SIGTERM
NOTE_BYTES = 1024
CLOSING_S = 60.0  # between the end of the pipe and that of the process
ENDED = "the process of the run ended without recording why: it was killed, or compiled code called exit or _exit"
LOCKED = "SIGTERM has no effect, because compiled code keeps the interpreter lock; ending the process, stacks follow"


@contextlib.contextmanager
def witnessed(
    log: Path, farewells: list[Callable[[], None]], *, answer_s: float = ANSWER_S
) -> Generator[Callable[[str], object]]:
    """Have another process write to stderr and `log` if this process ends in the body without leaving it.

    Yields a function that takes a text for that message, about the user code that is called. Functions that end this
    process on purpose call those in `farewells` before.

    After SIGTERM it ends this process by a signal that prints the stacks, if no thread of Python has run for `answer_s`
    seconds. Signals are seen only if this is called in the main thread.
    """
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    words = [sys.executable, "-S", "-E", __file__, str(os.getpid()), str(log), str(answer_s)]
    try:
        with tempfile.TemporaryFile() as shared:  # stdout of the process, which reads it
            shared.truncate(NOTE_BYTES)
            called = mmap.mmap(shared.fileno(), NOTE_BYTES)
            process = subprocess.Popen(words, stdin=source, stdout=shared.fileno(), start_new_session=True)
    except OSError as error:
        os.close(sink)
        logger.warning("no process can be started beside the run to report its sudden end: %s", error)
        yield lambda _: None
        return
    finally:
        os.close(source)

    def note(text: str) -> None:
        called[:] = text.encode(errors="replace")[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")

    def end() -> None:
        with contextlib.suppress(OSError):  # user code closed the pipe, or the other process is gone
            os.write(sink, END)
            os.close(sink)

    farewells.append(end)
    try:
        with _pulses(sink):
            yield note
    finally:
        farewells.remove(end)
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


@contextlib.contextmanager
def _pulses(sink: int) -> Generator[None]:
    """Write pulses and the numbers of signals to a pipe."""
    done = threading.Event()
    thread = threading.Thread(
        target=_pulse, args=(sink, os.fstat(sink).st_ino, done), name="furlong-pulse", daemon=True
    )
    thread.start()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.set_wakeup_fd(sink, warn_on_full_buffer=False) if is_main else -1
    _forked_without.append(sink)
    try:
        yield
    finally:
        _forked_without.remove(sink)
        if is_main:
            signal.set_wakeup_fd(before)
        done.set()
        thread.join()


_forked_without: list[int] = []  # open pipes


def _after_fork() -> None:
    """Signals of a forked process are not those of the run."""
    if _forked_without:
        signal.set_wakeup_fd(-1)
        for sink in _forked_without:
            with contextlib.suppress(OSError):
                os.close(sink)
        _forked_without.clear()


os.register_at_fork(after_in_child=_after_fork)


def _pulse(sink: int, pipe: int, done: threading.Event) -> None:
    while not done.wait(PULSE_S):
        try:
            if os.fstat(sink).st_ino != pipe:  # user code closed it
                return
            os.write(sink, PULSE)
        except BlockingIOError:  # the other process is stopped
            continue
        except OSError:
            return


def main(run: int, log: str, answer_s: float) -> None:
    """Watch the parent process `run` until it ends, or says that its run has ended."""
    last, terminated, is_open = time.monotonic(), False, True
    while os.getppid() == run:
        if is_open and select.select([0], [], [], 0.5)[0]:
            messages = os.read(0, 4096)
            if END in messages:
                return
            is_open, terminated, last = bool(messages), terminated or SIGTERM in messages, time.monotonic()
        elif not is_open:
            time.sleep(0.02)
            if time.monotonic() - last > CLOSING_S:  # user code closed the pipe
                return
        elif terminated and time.monotonic() - last > answer_s:
            _say(log, f"{LOCKED} (process {run})")
            os.kill(run, signal.SIGVTALRM)
            time.sleep(5)
            if os.getppid() == run:
                os.kill(run, signal.SIGKILL)
            return
    while select.select([0], [], [], 0)[0] and (messages := os.read(0, 4096)):
        if END in messages:  # it said so before it ended
            return
    _say(log, f"{ENDED} (process {run}){_called()}")


def _called() -> str:
    """Return the text that the run shared last, in the file that is stdout."""
    with contextlib.suppress(OSError):
        text = os.pread(1, NOTE_BYTES, 0).rstrip(b"\0").decode(errors="replace")
        return f"; it called last: {text}" if text else ""
    return ""


def _say(log: str, text: str) -> None:
    """Write a line to stderr, and to the log unless it was deleted."""
    line = f"furlong: {text}\n".encode()
    with contextlib.suppress(OSError):
        os.write(2, line)
    with contextlib.suppress(OSError):
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.write(file, line)
        os.close(file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
