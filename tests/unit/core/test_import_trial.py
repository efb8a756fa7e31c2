"""Modules of user functions are imported in a child process first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from furlong.core.import_trial import ImportTrial
from furlong.core.process_state import ProcessState

pytestmark = pytest.mark.slow  # starts processes

Problems = Callable[..., list[str]]


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    """Import modules with these texts, and return the problem of each; "" if there is none."""

    def import_texts(*texts: str, timeout_s: float = 60.0) -> list[str]:
        paths = [str(tmp_path / f"user_{i}.py") + ":f" for i in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            Path(path.removesuffix(":f")).write_text(textwrap.dedent(text))
        refused = ImportTrial(paths, timeout_s=timeout_s).problems()
        return [refused.get(path, "") for path in paths]

    return import_texts


def test_modules_that_end_the_process_are_named_with_their_line(problems: Problems, tmp_path: Path) -> None:
    texts = (
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)",
        "x = 1\nraise KeyboardInterrupt",
        "import os\nos.kill(os.getpid(), 9)",
        "def f(): ...",
    )
    found = problems(*texts)
    assert found.pop() == ""
    assert "killed by SIGKILL" in found.pop()
    for number, problem in enumerate(found):
        assert f"{tmp_path / f'user_{number}.py'}:2" in problem
        assert "ends the process" in problem


def test_a_module_that_hangs_is_named_with_its_line_after_the_limit(problems: Problems, tmp_path: Path) -> None:
    started = time.monotonic()
    (problem,) = problems("import time\n\n\ndef wait():\n    time.sleep(1000)\n\nwait()", timeout_s=0.8)
    assert f"{tmp_path / 'user_0.py'}:5 in wait" in problem
    assert "within 0.8 s" in problem
    assert "--hook-import-timeout" in problem
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("import json\nx = 1\njson.dumps = repr\ny = 2", "json.dumps", 3),
        ("import time\ndef g():\n    time.monotonic = lambda: 0.0\n\ng()", "time.monotonic", 3),
        ("import sys\nsys.modules['json'] = object()", "the module json", 2),
        ("import os\nos.closerange(3, 256)", "a file of furlong", 2),
        ("import sys\nsys.stdout.close()", "sys.stdout", 2),
        ("import os\nos.close(1)", "descriptor 1 (stdout)", 2),
        ("import os\nos.chdir('/')", "working directory", 2),
        ("import os\nos.umask(0o777)", "umask from", 2),
        ("import warnings\nwarnings.simplefilter('error')", "warnings of any module", 2),
        ("import sys\nsys.setrecursionlimit(100)", "recursion limit", 2),
        ("import torch\nx = 1\ntorch.exp = lambda x: x", "torch.exp", 3),
        ("import psutil\n\npsutil.Process = None", "psutil.Process", 3),
        ("import psutil\n\ndel psutil.pids", "psutil.pids", 3),
        ("import psutil\nfrom unittest.mock import MagicMock\npsutil.Process = MagicMock()", "psutil.Process", 3),
        ("import psutil\n\npsutil.virtual_memory = str", "psutil.virtual_memory", 3),
        ("import torch\n\ntorch.use_deterministic_algorithms(True)", "deterministic algorithms to True", 3),
        ("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))", "RLIMIT_NOFILE", 2),
        ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)", "SIGTERM", 2),
    ],
)
def test_a_module_that_changes_the_process_is_named_with_its_line(
    problems: Problems, tmp_path: Path, text: str, what: str, line: int
) -> None:
    (problem,) = problems(text)
    assert what in problem
    assert f"{tmp_path / 'user_0.py'}:{line};" in problem


def test_harmless_modules_pass(problems: Problems) -> None:
    texts = (
        "import multiprocessing, logging, random, subprocess\nlogging.basicConfig()\nrandom.seed(0)",
        "import signal, sys\nsignal.signal(signal.SIGALRM, lambda *_: None)\nsys.setrecursionlimit(50_000)",
        "import os, builtins\nos.environ['A'] = 'b'\nbuiltins.ic = print",
        "raise ValueError('left to the import in the run')",
        "import no_such_module_at_all",
    )
    assert problems(*texts) == [""] * len(texts)


def test_processes_of_a_module_end_with_its_trial(problems: Problems, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = (
        f"import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\nopen({str(pid)!r}, 'w').write(str(child.pid))"
    )
    assert problems(text) == [""]
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid.read_text()}/stat").exists() and time.monotonic() < deadline:
        if ") Z " in Path(f"/proc/{pid.read_text()}/stat").read_text():
            break
        time.sleep(0.01)
    assert time.monotonic() < deadline


def test_the_state_of_a_process_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ProcessState()
    assert state.changes() == []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    handler = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        changes = state.changes()
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert [word for word in ("time.monotonic", "working directory", "SIGHUP") if word not in " ".join(changes)] == []
    assert len(changes) == 3
    state.close()


def test_imports_of_large_libraries_change_nothing() -> None:
    text = (
        "from furlong.core.process_state import ProcessState; import asyncio, sys\n"
        "s = ProcessState()\nimport numpy, torch, transformers, httpx, pyarrow\nsys.exit(repr(s.changes()))"
    )
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=dict(os.environ))
    assert ended.stderr.strip().splitlines()[-1] == "[]"
