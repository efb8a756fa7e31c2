from __future__ import annotations

import asyncio
import os
import resource
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from furlong.core.process_supervisor import delete_tree
from furlong.core.supervised_process import ProcessLimits, run_supervised
from furlong.errors import ConfigError, DataError, InfraError
from furlong.sandboxes import (
    CodeSandbox,
    Executed,
    SandboxLimits,
    SandboxPool,
    box_init,
    bubblewrap,
    sandbox,
    subprocess_backend,
)
from furlong.sandboxes.code_sandbox import ISOLATION
from supervised_commands import live_commands

MIB = 1 << 20


def in_sandbox(use: Callable[[CodeSandbox], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with sandbox(**options) as opened:
            return await use(opened)

    return asyncio.run(main())


def run(command: str, **limits: Any) -> Executed:
    return in_sandbox(lambda opened: opened.exec(command), limits=SandboxLimits(**limits))


@pytest.fixture(scope="module", autouse=True)
def _isolates():
    """Skip, with the reason, where this machine cannot isolate."""
    try:
        run("true")
    except ConfigError as error:
        pytest.skip(str(error))


def trees() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if process.name() == "bwrap"]


def left_behind() -> list[object]:
    """Return the live processes of commands and sandboxes, and their temporary folders."""
    return [*live_commands().values(), *trees(), *Path(tempfile.gettempdir()).glob("furlong-s*-*")]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert left_behind() == []


def test_a_program_and_its_tests_run_with_the_interpreter_of_the_driver():
    async def use(opened: CodeSandbox) -> None:
        await opened.write("pkg/sums.py", "def add(a, b):\n    return a + b\n")
        await opened.write("check.py", "from pkg.sums import add\nassert add(2, 3) == 5\nprint(input())\n")
        done = await opened.exec("python check.py > said.txt; cat said.txt; echo bad >&2; exit 3", stdin="hello\n")
        assert (done.code, done.stdout, done.stderr) == (3, "hello\n", "bad\n")
        assert await opened.read("said.txt") == b"hello\n"
        with pytest.raises(FileNotFoundError):
            await opened.read("absent.txt")

    in_sandbox(use)


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        ("python -c 'bytearray(2 << 30)'", 1, ""),
        ("python -c 'b = [bytearray(60 << 20) for _ in range(2)]; import os; os.fork(); b2 = bytearray(90 << 20); "
         "import time; time.sleep(30)'", None, "MiB of memory, the limit is 256 MiB"),
        ("for i in $(seq 40); do sleep 30 & done; wait", None, "processes, the limit is 16"),
        ("head -c 9000000 /dev/zero > big", None, ""),
        ("kill -SEGV $$", -11, ""),
        ("python -c 'while True: pass'", None, ""),
    ],
    ids=["one-allocation", "memory-of-two", "processes", "file-size", "signal", "cpu"],
)  # fmt: skip
def test_limits_end_a_command(command, code, reason):
    done = run(command, memory_bytes=256 * MIB, max_processes=16, file_bytes=4 * MIB, cpu_s=1)
    assert done.code == code if code is not None or reason else done.code != 0
    assert reason in done.reason


MANY_OBJECTS = """
import asyncio, multiprocessing, sqlite3, time
async def echo(reader, writer):
    while data := await reader.read(9): writer.write(data)
async def connections():
    server = await asyncio.start_server(echo, "127.0.0.1", 0, backlog=200)
    pairs = [await asyncio.open_connection(*server.sockets[0].getsockname()) for _ in range(200)]
    with multiprocessing.get_context("fork").Pool(8) as pool:  # inherits the descriptors
        pool.map(time.sleep, [0.1] * 80)
    for _, writer in pairs: writer.write(b"x")
    return len([await reader.readexactly(1) for reader, _ in pairs])
if __name__ == "__main__":
    kept = [sqlite3.connect("data") for _ in range(100)]
    kept[0].execute("pragma journal_mode=wal"); kept[0].execute("create table numbers (number)")
    for each in kept:
        with each: each.execute("insert into numbers values (1)")
    print(kept[0].execute("select count(*) from numbers").fetchone()[0], asyncio.run(connections()))
    with multiprocessing.get_context("forkserver").Pool(8) as pool: print(sum(pool.map(abs, range(-999, 1))))
"""


def test_programs_with_many_locks_connections_and_inherited_descriptors_run():
    async def use(opened: CodeSandbox) -> Executed:
        await opened.write("many.py", MANY_OBJECTS)
        return await opened.exec("python many.py")

    done = in_sandbox(use, limits=SandboxLimits(memory_bytes=512 * MIB))
    assert (done.stdout, done.reason) == ("100 200\n499500\n", ""), done.stderr


@pytest.mark.parametrize("protocol", [4, 99])  # NETLINK_SOCK_DIAG; one that no kernel has
def test_queues_of_tcp_connections_count_also_where_the_kernel_does_not_report_their_memory(monkeypatch, protocol):
    monkeypatch.setattr(box_init, "_SOCK_DIAG", protocol)
    before = box_init._socket_bytes(0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.setblocking(False)
        sent = client.send(bytes(4 * MIB))
        assert sent > MIB / 2
        assert box_init._socket_bytes(0) - before > 0.9 * sent


def test_a_command_that_hangs_stops_or_forks_ends_within_its_time():
    for command in ("sleep 100", "kill -STOP $$", "kill -STOP $PPID; sleep 100", "exec >&- 2>&-; sleep 100"):
        assert run(command, timeout_s=0.5).is_timeout, command
    done = run("(setsid sleep 100 &); (setsid sh -c 'trap \"\" TERM HUP; sleep 100' &); echo started")
    assert (done.code, done.stdout) == (0, "started\n")


def test_the_end_of_long_output_is_kept():
    done = run("python -c \"print('x' * 3_000_000 + 'end')\"", output_bytes=1000)
    assert (len(done.stdout), done.stdout[-4:]) == (1000, "end\n")


def test_without_namespaces_daemons_and_supervisors_that_are_killed_leave_nothing(tmp_path):
    for command in (
        "(setsid sleep 100 &); echo x",
        "(setsid sleep 100 &); sleep 0.2; kill -9 $PPID; sleep 100",
        "(setsid sleep 100 &); kill -STOP $PPID; sleep 100",
    ):
        words = ["/bin/sh", "-c", command]
        ended = asyncio.run(run_supervised(words, directory=str(tmp_path), environment=dict(os.environ), timeout_s=1.0))
        assert ended.code in (0, None)


def test_a_command_runs_in_a_process_with_thousands_of_connections(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    connections = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # select() takes numbers up to 1023
    try:
        ended = asyncio.run(run_supervised(["/bin/echo", "here"], directory=str(tmp_path), environment={}))
    finally:
        for number in connections:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (ended.code, ended.stdout) == (0, b"here\n")


def test_a_cancelled_command_ends(tmp_path):
    async def main() -> None:
        words = ["/bin/sh", "-c", "setsid sleep 100 & touch started; wait"]
        command = run_supervised(
            words, directory=str(tmp_path), environment={"PATH": os.environ["PATH"]}, limits=ProcessLimits()
        )
        task = asyncio.create_task(command)
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_paths_outside_links_and_pipes_are_refused():
    async def use(opened: CodeSandbox) -> None:
        for path in ("/etc/passwd", "../x", ""):
            with pytest.raises(DataError):
                await opened.read(path)
            with pytest.raises(DataError):
                await opened.write(path, "x")
        await opened.exec("ln -s /etc/passwd link; ln -s / root; mkfifo pipe; mkdir folder; chmod 0 folder")
        for path in ("link", "root/etc/passwd", "pipe", "folder"):
            with pytest.raises(DataError):
                await opened.read(path)
        with pytest.raises(DataError):
            await opened.write("link", "x")

    in_sandbox(use)


def test_a_sandbox_that_is_killed_from_outside_is_lost():
    async def use(opened: CodeSandbox) -> None:
        running = asyncio.create_task(opened.exec("sleep 100"))
        await asyncio.sleep(0.3)
        for process in trees():
            process.kill()
        done = await running
        assert (done.code, "first process" in done.reason) == (None, True)
        with pytest.raises(InfraError):
            await opened.exec("true")
        with pytest.raises(InfraError):
            await opened.read("x")

    in_sandbox(use)


def test_the_network_is_that_of_the_machine_only_on_request():
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        assert [run(f'python -c "{code}"', network=network).code for network in (True, False)] == [0, 1]


def test_private_folders_below_shown_ones_are_hidden(monkeypatch, tmp_path):
    project = tmp_path / "system" / "src" / "project"
    (project / "venv" / "bin").mkdir(parents=True)
    for path in (project.parent / "library", project / "key", project / "venv" / "bin" / "tool", project / "shown"):
        path.write_text("content")
    monkeypatch.setattr(bubblewrap, "_FOLDERS", (*bubblewrap._FOLDERS, str(tmp_path / "system")))
    python = bubblewrap._python_paths()
    monkeypatch.setattr(bubblewrap, "_python_paths", lambda: [*python, str(project / "venv" / "bin")])
    monkeypatch.chdir(project)
    done = run(f"cd {project.parent}; find . -type f; echo x > project/new", readable=(str(project / "shown"),))
    assert sorted(done.stdout.split()) == ["./library", "./project/shown", "./project/venv/bin/tool"]
    assert done.code != 0
    for path in (str(tmp_path / "absent"), "/", "/tmp", "/proc/self", "/tmp/work/x"):
        with pytest.raises(ConfigError, match="readable"):
            run("true", readable=(path,))


def test_wrong_arguments_and_closed_sandboxes_are_errors():
    with pytest.raises(ConfigError, match="subprocess"):
        in_sandbox(lambda opened: opened.exec("true"), backend="subproces")
    with pytest.raises(ConfigError, match="has no image"):
        in_sandbox(lambda opened: opened.exec("true"), backend="subprocess", image="python:3.12")
    for wrong in ({"timeout_s": 0}, {"memory_bytes": -1}, {"require": ("disk",)}):
        with pytest.raises(ConfigError):
            SandboxLimits(**wrong)

    async def late() -> None:
        async with sandbox() as opened:
            pass
        with pytest.raises(InfraError, match="closed"):
            await opened.exec("true")

    asyncio.run(late())


def test_a_machine_that_cannot_isolate_refuses_unless_told_otherwise(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(subprocess_backend, "_working", set())
    monkeypatch.setattr(subprocess_backend, "find_bubblewrap", lambda: None)
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*--sandbox-isolation none"):
        run("true")
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(subprocess_backend, "find_bubblewrap", lambda: str(refusing))
    with pytest.raises(ConfigError, match=r"No permissions to create new namespace.*--sandbox-isolation none"):
        run("true")

    monkeypatch.setenv(ISOLATION, "none")
    monkeypatch.setenv("SECRET_API_KEY", "sk-1")

    async def use(opened: CodeSandbox) -> str:
        assert sorted(opened.missing) == ["files", "network", "processes"]
        assert (await opened.exec("kill -SEGV $$")).code == -11
        return (await opened.exec(f"ls {tmp_path}; echo $SECRET_API_KEY")).stdout

    assert "bwrap" in in_sandbox(use)
    assert "sk-1" not in in_sandbox(use)
    assert [record.message for record in caplog.records if "--sandbox-isolation none" in record.message] != []
    assert len(caplog.records) == 1
    with pytest.raises(InfraError, match="require"):
        run("true", require=("network",))
    monkeypatch.setenv(ISOLATION, "some")
    with pytest.raises(ConfigError, match="required"):
        run("true")


@pytest.mark.parametrize("isolation", ["required", "none"])
def test_a_command_that_replaces_its_folder_reaches_no_other_files(isolation, monkeypatch, tmp_path):
    monkeypatch.setenv(ISOLATION, isolation)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_text("secret")

    async def use(opened: CodeSandbox) -> None:
        await opened.exec(f'cd ..; mv "$HOME" moved; rm -rf "$HOME"; ln -s {outside} "$HOME"; ln -s {outside} link')
        with pytest.raises(FileNotFoundError):
            await opened.read("key")
        await opened.write("key", "mine")
        assert await opened.read("key") == b"mine"
        assert (outside / "key").read_text() == "secret"

    in_sandbox(use)
    for link in tmp_path.iterdir():
        if link.is_symlink():
            link.unlink()
        elif link.name == "moved":  # what a command without isolation has moved stays
            delete_tree(str(link))


@pytest.mark.parametrize("isolation", ["required", "none"])
def test_deep_folders_without_rights_are_deleted(isolation, monkeypatch):
    monkeypatch.setenv(ISOLATION, isolation)
    code = "import os\nfor _ in range(1200): os.mkdir('deep'); os.chdir('deep')\nos.chmod('.', 0)"

    async def use(opened: CodeSandbox) -> None:
        await opened.write("deep.py", code)
        done = await opened.exec("python deep.py; mkdir shut; chmod 0 shut .")
        assert done.code == 0, done.stderr
        await opened.write("after", "x")
        assert (await opened.exec("[ -O . ] && cat after")).stdout == "x"

    in_sandbox(use)


def test_commands_of_one_sandbox_take_turns_and_can_be_cancelled():
    async def use(opened: CodeSandbox) -> None:
        both = await asyncio.gather(*(opened.exec(f"echo {number} >> log; sleep 0.1; cat log") for number in (1, 2)))
        assert [done.stdout for done in both] == ["1\n", "1\n2\n"]
        slow = asyncio.create_task(opened.exec("touch started; sleep 100"))
        await asyncio.sleep(0.3)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert (await opened.exec("ls; ps -e | grep -c sleep")).stdout == "log\nstarted\n0\n"

    in_sandbox(use)


def test_a_pool_hands_out_each_sandbox_once():
    async def main() -> None:
        pool = SandboxPool(2, episode_s=10)
        try:
            for number in range(3):
                async with pool.take() as opened:
                    assert (await opened.exec("ls")).stdout == ""
                    await opened.write(f"{number}.txt", "x")
        finally:
            await pool.close()

    asyncio.run(main())
    with pytest.raises(ConfigError, match="ttl_s"):
        SandboxPool(1, limits=SandboxLimits(ttl_s=5), episode_s=10)
