"""Temporary folders are gone when they are removed, and when the process that made them is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from furlong.core.scratch_folder import make_scratch_folder, remove_scratch_folder
from furlong.core.user_processes import ending_user_processes

PROGRAM = """
import os, pathlib, sys, time
from furlong.core.scratch_folder import make_scratch_folder

folders = [make_scratch_folder("some-") for _ in range(2)]
closed = pathlib.Path(folders[0], "closed")
closed.mkdir()
(closed / "file").write_text("x")
closed.chmod(0)
if os.fork() == 0:  # keeps descriptors that are not closed on a fork
    os.write(1, b"%d\\n" % os.getpid())  # a whole line at once
    time.sleep(60)
os.write(1, b"made\\n")
time.sleep(60)
"""


def reapers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if any("scratch_folder" in word for word in each.cmdline())]


def test_a_killed_process_leaves_no_folder_although_its_forked_child_lives(tmp_path):
    program = [sys.executable, "-c", PROGRAM]
    child = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert child.stdout is not None
    said = [child.stdout.readline().strip() for _ in range(2)]
    (forked,) = [int(line) for line in said if line != "made"]
    try:
        assert list(tmp_path.glob("*/some-*/closed"))
        child.kill()
        child.wait()
        deadline = time.monotonic() + 10
        while list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(tmp_path.iterdir()) == []
        assert psutil.pid_exists(forked)
    finally:
        os.kill(forked, 9)
        child.stdout.close()


def test_the_last_removal_ends_the_reaper_and_an_open_folder_is_not_reported_at_the_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ending_user_processes():
        first, second = make_scratch_folder("a-"), make_scratch_folder("b-")
        remove_scratch_folder(first)
        assert os.path.isdir(second)
        assert len(reapers()) == 1
    assert not caplog.records
    remove_scratch_folder(second)
    assert reapers() == []
    assert list(tmp_path.iterdir()) == []
