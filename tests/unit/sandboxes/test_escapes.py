"""Nothing that a policy runs in a sandbox leaves it, started by root or by an ordinary user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from escapes import ESCAPES
from furlong.sandboxes.bubblewrap import find_bubblewrap
from furlong.sandboxes.code_sandbox import ISOLATION

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap needs Linux")
TESTS = Path(__file__).parents[2]
SOURCE = TESTS.parent / "src"
ORDINARY = 61234


def as_ordinary_user(words: list[str]) -> list[str]:
    """Return the command in a view of the machine in which all users may enter the folders of Python and of tests."""
    program = find_bubblewrap()
    assert program is not None
    view = [program, "--dev-bind", "/", "/"]
    shown = [sys.base_prefix, sys.prefix, str(SOURCE), str(TESTS)]
    closed = {
        folder
        for path in shown
        for folder in Path(path).parents
        if not folder.stat().st_mode & 1 and not any(not above.stat().st_mode & 1 for above in folder.parents)
    }
    for folder in sorted(closed):
        view += ["--perms", "0755", "--tmpfs", str(folder)]
        for path in shown:
            if folder in Path(path).parents:
                for above in reversed(Path(path).relative_to(folder).parents):
                    view += ["--perms", "0755", "--dir", str(folder / above)]
                view += ["--ro-bind", path, path]
    return [*view, "--", *words, "--uid", str(ORDINARY)]


def attempts(user: str, *words: str, **variables: str) -> dict[str, Any]:
    """Make the attempts in a process of this user; skip, with the reason, where it cannot be isolated."""
    command = [sys.executable, str(TESTS / "helpers" / "escapes.py"), *words]
    if os.geteuid() == 0 and user == "ordinary user":
        command = as_ordinary_user(command)
    elif os.geteuid() != 0 and user == "root":
        pytest.skip("sandboxes that root opens need a run of the tests as root")
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{TESTS / 'helpers'}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=600, check=False
    )
    if "does not let bubblewrap isolate" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("user", ["root", "ordinary user"])
def test_no_attempt_to_leave_a_sandbox_succeeds(user):
    result = attempts(user)
    assert (result["uid"] == 0) == (user == "root")
    assert result["attempts"] == len(ESCAPES) >= 40
    assert result["succeeded"] == {}


def test_attempts_succeed_where_nothing_is_isolated():
    for name in ("file in", "file on", "servers of", "sockets of", "environment of", "keyrings", "32-bit"):
        result = attempts("ordinary user", "--only", name, **{ISOLATION: "none"})
        assert len(result["succeeded"]) == result["attempts"] > 0, name


@pytest.mark.nightly
def test_attempts_to_use_memory_of_the_kernel_succeed_where_nothing_is_isolated():
    result = attempts("ordinary user", "--only", "kernel memory", **{ISOLATION: "none"})
    assert len(result["succeeded"]) == result["attempts"] == 12
    assert all("ESCAPED" in text for text in result["succeeded"].values()), result
