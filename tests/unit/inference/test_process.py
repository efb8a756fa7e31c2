"""Processes of `LocalHost`: ports, logs and cleanup."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from furlong.errors import ConfigError
from furlong.inference.supervisor.process import LocalHost, loopback_address, port_range, tail

QUICK = [sys.executable, "-S", "-E", "-c"]  # a Python that starts in 15 ms
WAITING = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)
STOPPED = "import os, signal; print('up', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
PARENT = (
    "import subprocess, sys, signal\n"
    "p = subprocess.Popen([sys.executable, '-S', '-E', '-c', 'import time; time.sleep(60)'])\n"
    "print(p.pid, flush=True); signal.pause()"
)


async def until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_output_goes_to_the_log_and_the_exit_code_is_known(tmp_path):
    async def case() -> None:
        log = tmp_path / "logs" / "x.log"
        process = await LocalHost().start(
            [*QUICK, "import os, sys; print(os.environ['WORD']); sys.stderr.write('bad\\n'); sys.exit(3)"],
            log=log,
            env={"WORD": "good"},
        )
        while (code := await process.poll()) is None:
            await asyncio.sleep(0.005)
        assert code == 3
        assert sorted(await process.log_tail()) == ["bad", "good"]

    asyncio.run(case())


def test_a_missing_command_is_reported_in_the_log(tmp_path):
    async def case() -> None:
        process = await LocalHost().start(["/no/such/program"], log=tmp_path / "x.log")
        while (code := await process.poll()) is None:
            await asyncio.sleep(0.005)
        assert code == 1
        assert await process.log_tail() == ["cannot execute /no/such/program: No such file or directory"]

    asyncio.run(case())


@pytest.mark.parametrize(
    ("program", "ended_by"), [(WAITING, signal.SIGTERM), (STUBBORN, signal.SIGKILL), (STOPPED, signal.SIGKILL)]
)
def test_stop_ends_a_process_even_if_it_ignores_sigterm(tmp_path, program, ended_by):
    async def case() -> None:
        log = tmp_path / "x.log"
        process = await LocalHost().start([*QUICK, program], log=log)
        await until(lambda: tail(log, 1) == ["up"])
        if program == STOPPED:
            await until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        await process.stop(grace_s=0.05 if ended_by == signal.SIGKILL else 20.0)
        ends = [-ended_by] if program != STOPPED else [-ended_by, -signal.SIGTERM]  # which may be delivered first
        assert await process.poll() in ends

    asyncio.run(case())


def test_stop_ends_the_children_of_a_process(tmp_path):
    async def case() -> None:
        log = tmp_path / "x.log"
        process = await LocalHost().start([*QUICK, PARENT], log=log)
        await until(lambda: tail(log, 1) != [])
        child = int(tail(log, 1)[0])
        assert is_running(child)
        await process.stop()
        await until(lambda: not is_running(child))

    asyncio.run(case())


def test_a_process_ends_with_the_program_that_started_it(tmp_path):
    log = tmp_path / "x.log"
    program = (
        "import asyncio, signal, sys\nfrom pathlib import Path\n"
        "from furlong.inference.supervisor.process import LocalHost\n"
        f"process = asyncio.run(LocalHost().start({[*QUICK, WAITING]!r}, log=Path({str(log)!r})))\n"
        "print(process.pid, flush=True)\nsignal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            asyncio.run(until(lambda: tail(log, 1) == ["up"]))
            assert is_running(child)
        finally:
            parent.kill()
    asyncio.run(until(lambda: not is_running(child)))


def test_reserved_ports_are_consecutive_and_bound_until_handed_over(tmp_path):
    async def case() -> None:
        host = LocalHost()
        ports = await host.reserve_ports(3)
        assert ports == list(range(ports[0], ports[0] + 3))
        assert port_range()[0] <= ports[0] < port_range()[1]
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        program = f"import socket; socket.socket().bind(('127.0.0.1', {ports[0]})); print('bound')"
        process = await host.start([*QUICK, program], log=tmp_path / "x.log", ports=[ports[0]])
        while await process.poll() is None:
            await asyncio.sleep(0.005)
        assert await process.log_tail() == ["bound"]
        await host.release_ports(ports)
        with socket.socket() as other:
            other.bind(("127.0.0.1", ports[1]))

    asyncio.run(case())


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_a_reserved_port_is_taken_for_both_families(family):
    address = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}[family]

    async def case() -> None:
        host = LocalHost()
        with socket.socket(family) as other:
            try:
                other.bind((address, 0))
            except OSError:
                pytest.skip(f"this machine has no {address}")
        [port] = await host.reserve_ports(1)
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
        await host.release_ports([port])
        with socket.socket(family) as other:
            other.bind((address, port))

    asyncio.run(case())


def test_a_machine_without_ipv4_uses_its_ipv6_loopback(monkeypatch):
    class Without(socket.socket):
        def bind(self, address):
            raise OSError(99, "Cannot assign requested address")

    assert LocalHost().address == "127.0.0.1"
    monkeypatch.setattr("furlong.inference.supervisor.process.socket.socket", Without)
    assert loopback_address() == "::1"


def test_a_port_that_was_handed_over_is_not_reserved_again(tmp_path, monkeypatch):
    async def case() -> None:
        host = LocalHost()
        monkeypatch.setattr("furlong.inference.supervisor.process.secrets.randbelow", lambda _: 0)
        [first] = await host.reserve_ports(1)
        process = await host.start([*QUICK, "pass"], log=tmp_path / "x.log", ports=[first])
        [second] = await host.reserve_ports(1)
        assert second > first
        await process.stop()
        await host.release_ports([second])

    asyncio.run(case())


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path):
    log = tmp_path / "x.log"
    assert tail(log, 3) == []
    log.write_text("".join(f"line {i}\n" for i in range(50_000)))
    assert tail(log, 2) == ["line 49998", "line 49999"]
    log.write_text("\x1b[2mwhen\x1b[0m \x1b[33m WARN\x1b[0m what\n")
    assert tail(log, 2) == ["when  WARN what"]


def test_the_end_of_a_log_omits_successful_requests(tmp_path):
    log = tmp_path / "engine.log"
    good = '2026 uvicorn.access: 127.0.0.1:5 - "POST /generate HTTP/1.1" 200 OK'
    bad = good.replace("200 OK", "500 Internal Server Error")
    log.write_text("\n".join(["first", bad, *[good] * 50]))
    assert tail(log, 5) == ["first", bad]


def test_a_fixed_port_is_reserved_only_once():
    async def case() -> None:
        host = LocalHost()
        [port] = await host.reserve_ports(1)
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            await host.reserve_ports(1, first=port)
        await host.release_ports([port])
        assert await host.reserve_ports(1, first=port) == [port]
        await host.release_ports([port])

    asyncio.run(case())
