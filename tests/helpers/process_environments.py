"""Environments for worker processes, which see the process that they are in: healthy ones, and one with faults."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

from furlong.core.sample import Sample
from furlong.environments import Observation, Step, Task
from furlong.errors import InfraError


class Counting:
    """Rewards each answer by its number; ends after `rounds`."""

    def __init__(self, rounds: int = 2, wait_s: float = 0.0) -> None:
        self.rounds, self.wait_s, self.turn = rounds, wait_s, 0

    def reset(self, task: Task, seed: int) -> str:
        return f"begin {task.prompt} {task.label} {seed}"

    def step(self, message: Any) -> Step:
        self.turn += 1
        time.sleep(self.wait_s)
        info = {"rounds": self.turn, "process": os.getpid()}
        return Step(f"turn {self.turn}: {message['content']}", float(self.turn), self.turn == self.rounds, info=info)


class Batched(Counting):
    """As Counting; its steps are made together. `batch` in info is the number of steps of the call."""

    @staticmethod
    def step_many(steps: list[tuple[Batched, Any]]) -> list[Any]:
        made = [environment.step(message) for environment, message in steps]
        for step in made:
            if isinstance(step, Step):
                step.info["batch"] = len(steps)  # pyright: ignore[reportIndexIssue]  a dict
        return made


class AsyncBatched(Counting):
    @staticmethod
    async def step_many(steps: list[tuple[Counting, Any]]) -> list[Any]:
        await asyncio.sleep(0.01)
        return Batched.step_many(steps)  # pyright: ignore[reportArgumentType]


class Asynchronous:
    async def reset(self, task: Task, seed: int) -> Observation:
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
        return Observation(task.messages, [tool])

    async def step(self, message: Any) -> Step:
        await asyncio.sleep(0.01)
        return Step(reward=0.25, truncated=True, info={"process": os.getpid(), "text": "\ud800 \n"})


class Leading:
    async def run(self, policy: Any, sample: Sample) -> dict[str, Any]:
        messages = [{"role": "user", "content": policy.decode(policy.encode(str(sample.prompt)))}]
        reply = await policy.chat(messages, max_new_tokens=32)
        again = await policy.role("judge").chat([*messages, reply.message, {"role": "user", "content": "again"}])
        sample.metadata["seen"] = {"process": os.getpid(), "content": again.content}
        return {"reward": 0.5, "said": reply.content}


class Faulty(Counting):
    """Has a fault in its second step: the one at the index of its sample among `faults`, none beyond them."""

    def __init__(self, faults: str) -> None:
        super().__init__(rounds=3)
        self.faults = faults.split(",")

    def step(self, message: Any) -> Any:
        index = int(message["content"].split()[0])
        fault = self.faults[index] if index < len(self.faults) and self.turn == 1 else "none"
        return getattr(self, fault)() or super().step(message)

    @staticmethod
    def batched(steps: list[tuple[Faulty, Any]]) -> list[Any]:
        """Return an exception for the steps that raise one."""
        made: list[Any] = []
        for environment, message in steps:
            try:
                made.append(environment.step(message))
            except (ValueError, MemoryError) as error:
                made.append(error)
        return made

    def none(self) -> None:
        """Be healthy."""

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(self) -> None:
        time.sleep(1000)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def fork(self) -> None:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv("/bin/sleep", ["sleep", "1000"])
            os._exit(0)

    def child(self) -> None:
        subprocess.Popen(["/bin/sh", "-c", "sleep 1000 & sleep 1000"], start_new_session=True)

    def output(self) -> None:
        sys.stdout.write("x" * 200_000 + "\n")

    def memory(self) -> None:
        bytearray(2 << 30)

    def closed(self) -> None:
        os.close(1)

    def closed_range(self) -> None:
        os.closerange(3, 64)

    def exit(self) -> None:
        os._exit(0)

    def sys_exit(self) -> None:
        sys.exit(3)

    def orphan(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    def infra(self) -> None:
        raise InfraError("the sandbox is gone")

    def error(self) -> None:
        raise ValueError("a bug")

    def timeout(self) -> None:
        raise TimeoutError("the server")

    def value(self) -> Any:
        return Step("x", info={"object": object()})

    def wrong(self) -> Any:
        return Step("x", reward=float("nan"))


class FaultyBatched(Faulty):
    step_many = staticmethod(Faulty.batched)
