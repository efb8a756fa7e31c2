"""The side of a reward worker: loads one reward function, and scores the samples of each call."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from typing import Any

from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, changed_fields
from furlong.core.user_code import location_of
from furlong.core.worker_process import Message, WorkerSide, decode_json, encode_json
from furlong.rewards.custom_reward import CustomReward, load_reward


class RewardWorker:
    """Answers the calls `load` and `score`."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self._function: CustomReward | None = None
        self._args: SandboxArgs | None = None
        self._timeout_s = 0.0
        self._memory_bytes = 0

    def begin(self, message: Message) -> None:
        """Begin a call."""
        number, function = message["id"], self._function
        if message["method"] == "load":
            self._side.call(number, lambda: self._load(message))
            return
        assert function is not None
        samples = [Sample.from_dict(data) for data in message["samples"]]
        before = decode_json(encode_json(message["samples"]))  # a copy: user code may change its samples

        def form(outcomes: Sequence[Outcome]) -> Message:
            changes = [changed_fields(sample, old) for sample, old in zip(samples, before, strict=True)]
            rows = [
                {"kind": each.kind, "reward": each.reward, "reason": self._limited(each.reason)} for each in outcomes
            ]
            return {"outcomes": rows, "changes": changes}

        if function.is_async:
            score = lambda: function.score_async(self._args, samples, self._timeout_s)  # noqa: E731
            self._side.call(number, score, form, is_async=True)
        else:
            self._side.call(number, lambda: function.score(self._args, samples), form)

    def _limited(self, reason: str) -> str:
        limit = f"MemoryError with --reward-memory-limit {self._memory_bytes / 2**30:g} GiB:"
        return reason.replace("MemoryError:", limit, 1) if self._memory_bytes else reason

    def _load(self, setup: Message) -> Message:
        self._memory_bytes = setup["memory_limit_bytes"] or 0
        if self._memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (setup["memory_limit_bytes"],) * 2)
        self._function = function = load_reward(setup["path"], group=setup["group"])
        self._args, self._timeout_s = SandboxArgs(setup["args"], setup["omitted"]), setup["timeout_s"]
        where = location_of(function.call)
        return {"is_of_group": function.is_of_group, "is_async": function.is_async, "where": where}


def split_args(args: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Split `args` (a mapping, or an object with `as_dict` or attributes) into JSON values and types of the rest."""
    if args is None or isinstance(args, Mapping):
        items: dict[Any, Any] = dict(args or {})
    elif hasattr(args, "as_dict"):
        items = dict(args.as_dict())
    else:
        names = [n for n in (vars(args) if hasattr(args, "__dict__") else dir(args)) if not n.startswith("_")]
        items = {name: getattr(args, name) for name in names}
    values: dict[str, Any] = {}
    omitted: dict[str, str] = {}
    for name, value in items.items():
        try:
            values[str(name)] = decode_json(encode_json(value))
        except TypeError:
            omitted[str(name)] = type(value).__name__
    return values, omitted


class SandboxArgs:
    """The options of the run for user code, as read-only attributes."""

    def __init__(self, values: Mapping[str, Any], omitted: Mapping[str, str]) -> None:
        vars(self).update(values, _omitted=omitted)

    def __getattr__(self, name: str) -> Any:
        if kind := vars(self)["_omitted"].get(name):
            raise AttributeError(f"args.{name} is a {kind}, which cannot be passed to the reward sandbox")
        raise AttributeError(f"there is no option {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args is read-only; args.{name} cannot be set to {value!r}")
