"""Run `python` and `furlong` commands in forks of one process that has everything imported.

`start(folder)` starts that process and returns the folder with the two commands, to be put first on PATH. A command
runs in a process of its own, with the caller's working directory, environment, streams and signals. It saves two
seconds of imports. What a command starts uses the usual interpreter: the folder is removed from its PATH.

The commands start a new interpreter for options such as `-W`, and if a variable that libraries read when they are
imported was changed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

PRELOADED = ("furlong.wiring.build", "furlong.cli", "furlong.inference.server.http_server")
READ_ON_IMPORT = ("CUDA", "HF_", "LD_", "MKL_", "OMP_", "PYTHON", "RAY_", "TORCH", "TRANSFORMERS_")
CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
now = {{n: v for n, v in os.environ.items() if n.startswith({prefixes!r}) and n != "PYTHONPATH"}}
is_plain = name == "furlong" or words and (words[0] in ("-", "-c", "-m") or words[0][0] != "-")
if now != {variables!r} or not is_plain:
    os.environ["PATH"] = os.environ["PATH"].replace({folder!r} + ":", "")
    os.execv({bin!r} + "/" + name, [{bin!r} + "/" + name, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([name, words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
pid = int.from_bytes(server.recv(8), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int.from_bytes(server.recv(8), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start the process, with its socket and commands in `folder`. Return it and the folder for PATH."""
    server = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    if server.stdout.readline() != "ready\n":
        raise RuntimeError(f"the warm Python ended with exit code {server.wait()}")
    is_cold = f"import sys; sys.exit({PRELOADED[0]!r} not in sys.modules)"
    if subprocess.run([folder / "bin" / "python", "-c", is_cold], check=False).returncode:
        server.terminate()
        raise RuntimeError("commands start new interpreters, as if this environment were not that of the warm Python")
    return server, folder / "bin"


def write_clients(folder: Path, variables: dict[str, str]) -> None:
    """Write the commands `python` and `furlong`, which start a new interpreter where these variables differ."""
    (folder / "bin").mkdir()
    text = CLIENT.format(
        python=sys.executable,
        prefixes=READ_ON_IMPORT,
        variables=variables,
        folder=str(folder / "bin"),
        bin=str(Path(sys.executable).parent),
        address=str(folder / "socket"),
    )
    for name in ("python", "furlong"):
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)


def serve(folder: Path) -> list[Any]:
    """Fork for each connection. Return in the process of a command: its name, words, working directory, environment."""
    variables = {n: v for n, v in os.environ.items() if n.startswith(READ_ON_IMPORT) and n != "PYTHONPATH"}
    for name in PRELOADED:  # torch, for one, sets a variable
        importlib.import_module(name)
    gc.freeze()  # a collection would copy the pages of all objects
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    write_clients(folder, variables)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return run_for(client)
        client.close()


def run_for(client: socket.socket) -> list[Any]:
    """Return in a fork with the streams of the client. Here, wait for it, and exit when it or the client has ended."""
    head, streams, _, _ = socket.recv_fds(client, 8, 3)
    request = b""
    while len(request) < int.from_bytes(head, "big"):
        request += client.recv(1 << 20)
    if (pid := os.fork()) == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        client.close()
        return json.loads(request)
    client.sendall(pid.to_bytes(8, "big"))
    for stream in (0, 1, *streams):
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
    execute(*serve(scratch), commands=scratch / "bin")
