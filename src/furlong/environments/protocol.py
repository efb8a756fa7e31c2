"""What an environment is: `reset` begins an episode, `step` answers the policy, and `run` replaces both.

    class Successor:
        def reset(self, task, seed):
            self.digit = seed % 8
            return f"{self.digit}+1="

        def step(self, message):
            return Step(reward=float(message["content"] == str(self.digit + 1)), done=True)

furlong makes one instance for each episode. Methods may be async; others run in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# Keys of a sample's metadata that environments, rubrics and roles write
ENVIRONMENT = "environment"  # name of the environment
INFO = "info"  # what the steps of the environment recorded
PARTS = "rewards"  # value of each function of the rubric
FAILED_PARTS = "rewards_failed"  # functions of the rubric that failed, with the reason
AGENT_ERROR = "agent_error"  # exception of an agent whose episode is scored

Message = Mapping[str, Any]
"""A chat message in OpenAI's form."""


@dataclass(frozen=True)
class Task:
    """The row of the data that an episode is about. All episodes of a group get equal tasks and seeds.

    prompt: text, or chat messages. tools: those of the row, in OpenAI's form.
    """

    prompt: str | list[dict[str, Any]]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: list[dict[str, Any]] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as chat messages."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)


@dataclass(frozen=True)
class Observation:
    """The beginning of an episode. messages: in OpenAI's form. tools: that the policy may call, in OpenAI's form."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Step:
    """What an environment answers to a message of the policy.

    messages: for the policy's next turn; text is a message of the user. reward: of this turn; the rewards of an episode
    are added up. done: whether the task has ended. truncated: whether the environment gave up, for example after its
    own limit. info: JSON values that are merged into `sample.metadata["info"]`.
    """

    messages: Sequence[Message] | str = ()
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Environment(Protocol):
    """The methods that furlong calls; each may be async. `close` is optional.

    `reset` returns an Observation, or only its messages, or the text of one message of the user. With a method
    `run(policy, sample)` neither `reset` nor `step` is called: it talks to the policy as a generate function does.
    """

    def reset(self, task: Task, seed: int) -> Any:
        """Begin an episode. Raises InfraError if a sandbox or server failed, so that the sample is issued again."""
        ...

    def step(self, message: Message) -> Any:
        """Return the Step after a message of the policy.

        A class may have `step_many(steps)` instead, a static or class method. It gets a list of (environment, message)
        with the steps of several episodes that are ready within 5 ms, and returns a list with the Step of each; an
        exception in the list fails only its episode. Calls do not overlap.
        """
        ...
