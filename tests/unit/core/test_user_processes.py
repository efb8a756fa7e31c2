from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time

import psutil
import pytest

from furlong.core import user_processes
from furlong.core.user_processes import MARK, ending_user_processes, kill_user_processes

DAEMON = (
    f"{os.getpid()}; import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
    "time.sleep(1000)"
)


def orphans() -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if DAEMON in _words(p) and p.status() != psutil.STATUS_ZOMBIE]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def run_until_orphaned() -> None:
    subprocess.run([sys.executable, "-c", DAEMON], check=True)
    deadline = time.monotonic() + 20
    while not orphans() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # until the second fork is done
    assert len(orphans()) == 1


def fork_until_orphaned() -> None:
    """Fork a process that leaves the tree of this one without starting a program."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.setsid()
            os.write(write, str(os.getpid()).encode())
            for number in range(3, 256):
                with contextlib.suppress(OSError):
                    os.close(number)
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)
    FORKED.append(psutil.Process(int(os.read(read, 20))))


FORKED: list[psutil.Process] = []


KILLED = """
import os, subprocess, sys, time
from furlong.core.user_processes import UserProcessReaper, ending_user_processes

before = subprocess.Popen(["sleep", "1000"])
with ending_user_processes():
    reaper = UserProcessReaper()
    command = subprocess.Popen(["sleep", "1000"])
    daemon = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"], start_new_session=True, close_fds=False)
    if (forked := os.fork()) == 0:
        os.setsid()
        time.sleep(1000)
    if len(sys.argv) > 1:
        os.closerange(3, 256)
        time.sleep(2.5)  # beyond the time that processes get to end by themselves
    print(before.pid, command.pid, daemon.pid, forked, flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("words", [[], ["closes descriptors"]])
def test_commands_daemons_and_forks_end_after_sigkill(words):
    driver = subprocess.Popen([sys.executable, "-c", KILLED, *words], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    before, *started = map(int, driver.stdout.readline().split())
    started += [child.pid for pid in started for child in psutil.Process(pid).children(recursive=True)]
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in [driver.pid, *started])
    driver.kill()
    driver.wait()
    driver.stdout.close()

    def alive(pids: list[int]) -> list[int]:
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    deadline = time.monotonic() + 10
    while alive(started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(started) >= 4
    assert alive([*started, before]) == [before], "what ran before is left alone"
    psutil.Process(before).kill()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("end", ["body", "exit"])
def test_a_forked_process_that_left_the_tree_is_killed(end):
    with ending_user_processes(), ending_user_processes():
        fork_until_orphaned()
        orphan = FORKED.pop()
        assert orphan.is_running()
        if end == "exit":
            kill_user_processes()
            assert not psutil.pid_exists(orphan.pid) or orphan.status() == psutil.STATUS_ZOMBIE
    assert not psutil.pid_exists(orphan.pid) or orphan.status() == psutil.STATUS_ZOMBIE
    assert MARK not in os.environ


@pytest.mark.parametrize(
    ("start", "command"),
    [
        (lambda: subprocess.Popen(["sleep", "1234"]), "sleep 1234"),
        (
            lambda: subprocess.Popen(["sleep", "1234"], start_new_session=True, env={"PATH": os.environ["PATH"]}),
            "sleep",
        ),
        (lambda: subprocess.Popen("sleep 1234 & wait", shell=True), "sleep 1234 & wait"),
        (run_until_orphaned, "os.setsid()"),
    ],
    ids=["subprocess", "session", "shell", "daemon"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.slow
def test_processes_started_in_the_body_are_killed_and_named_in_one_line(start, command, caplog):
    before = set(psutil.Process().children(recursive=True))
    with caplog.at_level(logging.WARNING), ending_user_processes():
        start()
    left = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == [] == orphans()
    assert MARK not in os.environ
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("furlong")]
    assert command in line


def test_processes_of_asyncio_are_killed():
    async def start() -> int:
        with ending_user_processes():
            process = await asyncio.create_subprocess_exec("sleep", "1234", start_new_session=True)
        return await process.wait()

    assert asyncio.run(start()) != 0


def test_processes_of_the_host_program_are_left_alone(caplog):
    tree = subprocess.Popen("sleep 1235 & wait", shell=True)
    try:
        with caplog.at_level(logging.WARNING), contextlib.suppress(KeyError), ending_user_processes():
            raise KeyError
        assert tree.poll() is None
        assert psutil.Process(tree.pid).children()
        assert caplog.records == []
    finally:
        for process in [*psutil.Process(tree.pid).children(), psutil.Process(tree.pid)]:
            process.kill()
        tree.wait()


def test_helpers_of_installed_packages_end_by_themselves(caplog, tmp_path, monkeypatch):
    monkeypatch.setattr(user_processes, "_PACKAGES", (str(tmp_path),))
    script = tmp_path / "helper.py"
    script.write_text("input()")
    with caplog.at_level(logging.WARNING), ending_user_processes():
        helper = subprocess.Popen([sys.executable, "-u", script], stdin=subprocess.PIPE)
    assert caplog.records == []
    assert helper.poll() is None
    helper.communicate(b"\n")
