"""User code that takes the machine's last memory ends the run with its line; nothing else does."""

from __future__ import annotations

import threading

import pytest

from fakes_loop import Unobserved
from furlong.diagnosis import memory_watchdog
from furlong.diagnosis.memory_watchdog import MemoryWatchdog
from furlong.machine import MemoryUse

GIB = 2**30


class Recorded(Unobserved):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def notify(self, event: str, **fields: object) -> None:
        self.messages.append(f"{event}: {fields['message']}")


@pytest.mark.parametrize(
    ("left", "grown", "runs", "ends"),
    [(0.1, 30, True, True), (0.1, 5, True, False), (5, 30, True, False), (0.1, 30, False, False)],
)
def test_only_user_code_that_took_much_and_leaves_little_ends_the_run(left, grown, runs, ends):
    observer, begun, over = Recorded(), threading.Event(), list[bool]()
    sizes, used = iter([2 * GIB]), iter([50])
    watchdog = MemoryWatchdog(
        reserve=0.02,
        observer=observer,
        machine=lambda: MemoryUse(int(next(used, 100 - left) * GIB), 100 * GIB, "the machine"),
        own_bytes=lambda: next(sizes, (2 + grown) * GIB),
    )

    def user_function():
        begun.set()
        while not over:
            pass

    thread = threading.Thread(target=user_function, name="asyncio_0")
    if runs:
        thread.start()
        begun.wait(10)
    try:
        looks = [watchdog._is_too_much() for _ in range(2)]
    finally:
        over.append(True)
        if runs:
            thread.join()
    assert looks == [False, ends]
    assert len(observer.messages) == ends
    if ends:
        assert "user_function (diagnosis/test_memory_watchdog.py:" in observer.messages[0]
        assert "30.0 GiB" in observer.messages[0]


def test_a_reserve_of_0_watches_nothing():
    with MemoryWatchdog(reserve=0, observer=Unobserved()) as watchdog:
        assert watchdog._thread is None


def test_looks_that_fail_for_a_moment_are_repeated_and_those_that_go_on_failing_are_an_error(monkeypatch):
    """User code that replaced a function, or took all descriptors, is reported where it returns."""
    monkeypatch.setattr(memory_watchdog, "PERIOD_S", 0)
    looks = iter([*[False] * 3, True, *[False] * 30])
    seen: list[int] = []

    def machine() -> None:
        seen.append(1)
        if not next(looks):
            raise OSError(24, "Too many open files")

    watchdog = MemoryWatchdog(reserve=0.02, observer=Unobserved(), machine=machine)
    with pytest.raises(OSError, match="Too many open files"):
        watchdog._watch()
    assert len(seen) == 4 + memory_watchdog.MAX_FAILURES
