"""What a local Ray cluster leaves behind is ended, also what has no mark of its own any more."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from furlong.cluster import ray_session, reaper

STARTER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-E", "-c", "import time; time.sleep(60)"], env={})
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_all_that_a_program_started_ends_with_it_even_if_its_environment_is_gone(tmp_path: Path) -> None:
    mark, folder = f"mark-{os.getpid()}", tmp_path / "sockets"
    folder.mkdir()
    bare = [sys.executable, "-S", "-E"]
    with (
        subprocess.Popen([*bare, "-c", "import time; time.sleep(60)"]) as stranger,
        subprocess.Popen(
            [*bare, "-c", STARTER], env={reaper.VARIABLE: mark}, stdout=subprocess.PIPE, text=True
        ) as starter,
        subprocess.Popen([*bare, reaper.__file__, mark, str(folder)], stdin=subprocess.PIPE) as watching,
    ):
        assert starter.stdout is not None
        assert watching.stdin is not None
        child = psutil.Process(int(starter.stdout.readline()))
        watching.stdin.close()  # the program is gone
        assert watching.wait(30) == 0
        assert starter.wait(30) == -9
        with contextlib.suppress(psutil.NoSuchProcess):
            child.wait(30)
        assert stranger.poll() is None
        assert not folder.exists()
        stranger.kill()


def test_a_process_of_ray_that_does_not_end_in_time_is_left_to_the_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        waited = 0

        def wait(self, timeout: float) -> int:
            self.waited += 1
            raise subprocess.TimeoutExpired("raylet", timeout)

    stuck = Stuck()
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr(ray_session, "_children", lambda: [stuck, stuck])
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as watching:  # ends with its stdin, as the reaper does
        ray_session.RaySession("local", is_own=True, _reaper=watching).close()
        assert watching.wait(30) == 0
    assert stuck.waited == 2
