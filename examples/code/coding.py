"""A code agent: the policy writes the body of a function, which runs in a sandbox; its result is the reward."""

from __future__ import annotations

from furlong.environments import Step
from furlong.sandboxes import SandboxLimits, sandbox

LIMITS = SandboxLimits(timeout_s=10, memory_bytes=512 << 20, max_processes=8)
RUN = "python -c 'from solution import answer; print(answer())'"


class Coding:
    """The reply becomes `return REPLY`. After a wrong result the model may write again, for half a point."""

    async def reset(self, task, seed):  # noqa: ARG002  the task decides everything
        """Show the task."""
        self.task, self.attempts = task, 0
        return task.messages

    async def step(self, message):
        """Run what the model wrote. The label stays outside of the sandbox, and an exit code of 0 proves nothing."""
        self.attempts += 1
        async with sandbox(limits=LIMITS) as box:
            await box.write("solution.py", f"def answer():\n    return {message['content']}\n")
            done = await box.exec(RUN)
        if done.code == 0 and done.stdout.strip() == str(self.task.label):
            return Step(reward=1.0 / self.attempts, done=True, info={"attempts": self.attempts})
        return Step(self.task.messages, reward=0.0, done=self.attempts == 2, info={"attempts": self.attempts})
