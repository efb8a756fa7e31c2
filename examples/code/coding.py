"""A code agent: the policy writes the body of a function, and unit tests in a sandbox are the reward."""

from __future__ import annotations

from furlong.environments import Step
from furlong.sandboxes import SandboxLimits, sandbox

LIMITS = SandboxLimits(timeout_s=10, memory_bytes=512 << 20, max_processes=8)
TESTS = "from solution import answer\nassert answer() == {label}, answer()\n"


class Coding:
    """The reply becomes `return REPLY`. After a failed test the model may write again, for half a point."""

    async def reset(self, task, seed):  # noqa: ARG002  the task decides everything
        """Show the task."""
        self.task, self.attempts = task, 0
        return task.messages

    async def step(self, message):
        """Run the tests on what the model wrote."""
        self.attempts += 1
        async with sandbox(limits=LIMITS) as box:
            await box.write("solution.py", f"def answer():\n    return {message['content']}\n")
            await box.write("tests.py", TESTS.format(label=self.task.label))
            done = await box.exec("python tests.py")
        if done.code == 0:
            return Step(reward=1.0 / self.attempts, done=True, info={"attempts": self.attempts})
        return Step(self.task.messages, reward=0.0, done=self.attempts == 2, info={"attempts": self.attempts})
