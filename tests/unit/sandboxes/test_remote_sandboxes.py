"""Docker's command line and E2B's package, as stand-ins that run commands on this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from furlong.errors import ConfigError, DataError, InfraError
from furlong.sandboxes import CodeSandbox, SandboxLimits, sandbox

DOCKER = """#!/bin/sh
home="$(dirname "$0")"
echo "$*" >> "$home/calls"
case $1 in
  run) mkdir -p "$home/box"; echo box-1 ;;
  rm) rm -rf "$home/box" ;;
  exec)
    if [ -e "$home/lost" ]; then rm "$home/lost"; echo "no such container" >&2; exit 125; fi
    shift 3; cd "$home/box" || exit 125
    for word in "$@"; do shift; set -- "$@" "$(echo "$word" | sed "s#/work/##g")"; done
    exec "$@" ;;
esac
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


async def works(opened: CodeSandbox) -> None:
    await opened.write("folder/a.txt", "one")
    assert await opened.read("folder/a.txt") == b"one"
    done = await opened.exec("cat; cat folder/a.txt; echo e >&2; exit 4", stdin="in ")
    assert (done.code, done.stdout, done.stderr) == (4, "in one", "e\n")
    assert (await opened.exec("sleep 30", timeout=0.3)).is_timeout
    with pytest.raises(FileNotFoundError):
        await opened.read("absent")


def test_a_container_has_limits_and_is_removed(docker):
    async def main() -> None:
        async with sandbox("python:3.12", SandboxLimits(memory_bytes=1 << 28, readable=("/srv",))) as opened:
            await works(opened)
            with pytest.raises(DataError):
                await opened.read("../../etc/passwd")

    asyncio.run(main())
    calls = (docker / "calls").read_text().splitlines()
    for words in (
        "--network none",
        "--memory 268435456",
        "--cap-drop ALL",
        "--volume /srv:/srv:ro",
        "python:3.12 3600",
    ):
        assert words in calls[0]
    assert calls[-1] == "rm --force box-1"
    assert not (docker / "box").exists()


def test_files_are_tried_again_and_commands_are_not(docker):
    async def main() -> None:
        async with sandbox("python:3.12") as opened:
            (docker / "lost").touch()
            await opened.write("a", "x")
            (docker / "lost").touch()
            with pytest.raises(InfraError, match="no such container"):
                await opened.exec("echo x >> a")
            assert await opened.read("a") == b"x"

    asyncio.run(main())


def test_docker_without_a_program_or_an_image_is_an_error(monkeypatch, tmp_path):
    async def main(image: str | None) -> None:
        async with sandbox(image, backend="docker"):
            pass

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="podman"):
        asyncio.run(main("python:3.12"))
    with pytest.raises(ConfigError, match="needs an image"):
        asyncio.run(main(None))


def e2b_module(folder: Path) -> ModuleType:
    """Return a stand-in of the package with the names that the backend uses."""
    module: Any = ModuleType("e2b")

    class CommandExitException(Exception):  # noqa: N818  its name in the package
        def __init__(self, done: Any) -> None:
            self.exit_code, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr

    class Remote:
        def __init__(self) -> None:
            self.commands, self.files = self, SimpleNamespace(read=self.read, write=self.write)

        async def run(self, words: str, timeout: float) -> Any:
            done = subprocess.run(words, shell=True, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise module.CommandExitException(done)
            return SimpleNamespace(exit_code=0, stdout=done.stdout, stderr=done.stderr)

        async def write(self, path: str, content: Any) -> None:
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)

        async def read(self, path: str, format: str) -> bytearray:
            try:
                return bytearray((folder / path).read_bytes())
            except FileNotFoundError as error:
                raise module.FileNotFoundException(str(error)) from error

        async def kill(self) -> None:
            module.killed += 1

    async def create(**options: Any) -> Remote:
        module.created.append(options)
        if len(module.created) == 1:
            raise RuntimeError("busy")
        return Remote()

    module.CommandExitException, module.killed, module.created = CommandExitException, 0, []
    module.AuthenticationException = type("AuthenticationException", (Exception,), {})
    module.FileNotFoundException = type("FileNotFoundException", (Exception,), {})
    module.AsyncSandbox = SimpleNamespace(create=create)
    return module


def test_a_machine_of_e2b(monkeypatch, tmp_path):
    module: Any = e2b_module(tmp_path)
    monkeypatch.setitem(sys.modules, "e2b", module)

    async def main() -> None:
        async with sandbox("base", backend="e2b", environment={"A": "1"}) as opened:
            await works(opened)

    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="E2B_API_KEY"):
        asyncio.run(main())
    monkeypatch.setenv("E2B_API_KEY", "k")
    asyncio.run(main())
    assert module.created[1] == {
        "template": "base", "timeout": 3600, "envs": {"A": "1"}, "allow_internet_access": False,
    }  # fmt: skip
    assert module.killed == 1


def test_e2b_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ConfigError, match=r"furlong-rl\[e2b\]"):
        asyncio.run(_open())


async def _open() -> None:
    async with sandbox(backend="e2b"):
        pass


def test_the_real_package_has_the_names_that_are_used():
    e2b = pytest.importorskip("e2b", reason="needs the extra e2b")
    for name in ("CommandExitException", "AuthenticationException", "FileNotFoundException"):
        assert issubclass(getattr(e2b, name), Exception)
    assert callable(e2b.AsyncSandbox.create)
