"""Run `python` and `furlong` commands in forks of one process that has everything imported.

`start(folder)` starts that process and returns the folder with the two commands, to be put first on PATH. A command
runs in its own session, with the caller's working directory, environment, streams and signals. It saves two
seconds of imports. What a command starts uses the usual interpreter: the folder is removed from its PATH.

The commands start a new interpreter for options such as `-W`, and if a variable that libraries read when they are
imported was changed. `request` starts a fork without such a command.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import setproctitle

PRELOADED = ("furlong.wiring.build", "furlong.cli", "furlong.inference.server.http_server")
READ_ON_IMPORT = ("CUDA", "HF_", "LD_", "MKL_", "OMP_", "PYTHON", "RAY_", "TORCH", "TRANSFORMERS_")
READ_LATER = ("PYTHONPATH",)
PR_SET_PDEATHSIG = 1
CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
{request}
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
now = {{n: v for n, v in os.environ.items() if n.startswith({read!r}) and n not in {later!r}}}
is_plain = name == "furlong" or words and (words[0] in ("-", "-c", "-m") or words[0][0] != "-")
if now != {variables!r} or not is_plain:
    os.environ["PATH"] = os.environ["PATH"].replace({folder!r} + ":", "")
    os.execv({bin!r} + "/" + name, [{bin!r} + "/" + name, *words])
server, pid = request({address!r}, [name, *words], dict(os.environ), [0, 1, 2])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int.from_bytes(server.recv(8), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def request(
    address: str, command: list[str], environment: dict[str, str], streams: list[int]
) -> tuple[socket.socket, int]:
    """Start a command. Return the socket that receives its exit code, and its process id.

    The command is killed when the socket is closed. The text of this function is part of CLIENT.
    """
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    text = json.dumps([command[0], command[1:], os.getcwd(), environment]).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], streams)
    server.sendall(text)
    return server, int.from_bytes(server.recv(8), "big")


def start(
    folder: Path,
    preloaded: Sequence[str] = PRELOADED,
    *,
    environment: Mapping[str, str] = os.environ,
    read_on_import: Sequence[str] = READ_ON_IMPORT,
    read_later: Sequence[str] = READ_LATER,
    owner: int | None = None,
) -> Path:
    """Start the process, with its socket and commands in `folder`. Return the folder for PATH.

    The commands need the `environment` of the process: the variables with a prefix in `read_on_import`, without those
    in `read_later`. It ends when the process `owner` does, by default this one.
    """
    words = [str(folder), str(owner or os.getpid()), *preloaded]
    done = subprocess.run([sys.executable, __file__, *words], env=environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RuntimeError(f"the warm Python ended with exit code {done.returncode}")
    variables = import_variables(environment, read_on_import, read_later)
    write_clients(folder, variables, read_on_import, read_later)
    check_commands(folder, preloaded[0], environment)
    return folder / "bin"


def check_commands(folder: Path, module: str, environment: Mapping[str, str]) -> None:
    """Raise RuntimeError if the commands start new interpreters, which have not imported the module."""
    is_cold = f"import sys; sys.exit({module!r} not in sys.modules)"
    if subprocess.run([folder / "bin" / "python", "-c", is_cold], env=environment, check=False).returncode:
        raise RuntimeError("commands start new interpreters, as if this environment were not that of the warm Python")


def import_variables(
    environment: Mapping[str, str], read_on_import: Sequence[str], read_later: Sequence[str]
) -> dict[str, str]:
    """Return the variables that modules may read when they are imported."""
    return {n: v for n, v in environment.items() if n.startswith(tuple(read_on_import)) and n not in read_later}


def write_clients(
    folder: Path, variables: Mapping[str, str], read_on_import: Sequence[str], read_later: Sequence[str]
) -> None:
    """Write the commands `python` and `furlong`, which start a new interpreter where these variables differ."""
    (folder / "bin").mkdir()
    text = CLIENT.format(
        python=sys.executable,
        request=inspect.getsource(request),
        read=tuple(read_on_import),
        later=tuple(read_later),
        variables=dict(variables),
        folder=str(folder / "bin"),
        bin=str(Path(sys.executable).parent),
        address=str(folder / "socket"),
    )
    for name in ("python", "furlong"):
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)


def serve(folder: Path, owner: int, preloaded: Sequence[str]) -> list[Any]:
    """Fork for each connection until the process `owner` has ended.

    Return in the process of a command: its name, words, working directory, environment.
    """
    end = os.pidfd_open(owner)
    for name in preloaded:
        importlib.import_module(name)
    gc.freeze()  # a collection would copy the pages of all objects
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    if os.fork():
        os._exit(0)  # `start` returns
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    while listener in select.select([listener, end], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os.close(end)
            return run_for(client)
        client.close()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def run_for(client: socket.socket) -> list[Any]:
    """Return in a fork with the streams of the client. Here, wait for it, and exit when it or the client has ended."""
    head, streams, _, _ = socket.recv_fds(client, 8, 3)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += client.recv(1 << 20)
    if (pid := os.fork()) == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        client.sendall(os.getpid().to_bytes(8, "big"))
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        client.close()
        return json.loads(text)
    for stream in streams:
        os.close(stream)
    if client in select.select([client, os.pidfd_open(pid)], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.sendall(code.to_bytes(8, "big", signed=True))
    os._exit(0)


def execute(name: str, words: list[str], folder: str, environment: dict[str, str], commands: Path) -> None:
    """Do what `python words` or `furlong words` does."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment | {"PATH": environment["PATH"].replace(f"{commands}:", "")})
    tempfile.tempdir = None  # is read from TMPDIR again
    python_path = [each for each in environment.get("PYTHONPATH", "").split(":") if each not in sys.path]
    if name == "furlong":
        words = [f"{Path(sys.executable).parent}/furlong", *words]
        name, code = "code", "import sys; from furlong.cli import main; sys.exit(main())"
    elif words[0] == "-":
        name, code = "code", sys.stdin.read()
    elif words[0] == "-c":
        name, code, words = "code", words[1], ["-c", *words[2:]]
    else:
        name, code, words = ("module", words[1], words[1:]) if words[0] == "-m" else ("file", words[0], words)
    first = str(Path(code).parent.resolve()) if name == "file" else ""
    sys.path[:] = [first, *python_path, *sys.path[1:]]
    sys.argv[:] = words
    if name == "module":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    elif name == "file":
        runpy.run_path(code, run_name="__main__")
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    scratch = Path(sys.argv[1])
    setproctitle.getproctitle()  # a later call would find less memory for titles
    command = serve(scratch, int(sys.argv[2]), sys.argv[3:])
    setproctitle.setproctitle(" ".join([command[0], *command[1]]))
    execute(*command, commands=scratch / "bin")
