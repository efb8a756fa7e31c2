"""The side of a reward worker: loads one reward function, and scores the samples of each call."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, changed_fields
from furlong.core.user_code import describe_exception, is_raised_by_user, location_of
from furlong.core.worker_process import Message, WorkerSide, decode_json, encode_json
from furlong.rewards.custom_reward import CustomReward, load_reward


class RewardWorker:
    """Answers the calls `load` and `score`."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self._function: CustomReward | None = None
        self._args: SandboxArgs | None = None
        self._timeout_s = 0.0

    def begin(self, message: Message) -> None:
        """Begin a call."""
        number = message["id"]
        if message["method"] == "load":
            self._side.call(number, lambda: self._load(message))
            return
        assert self._function is not None
        samples = [Sample.from_dict(data) for data in message["samples"]]
        before = decode_json(encode_json(message["samples"]))  # a copy: user code may change its samples

        def form(outcomes: Sequence[Outcome]) -> Message:
            changes = [changed_fields(sample, old) for sample, old in zip(samples, before, strict=True)]
            rows = [{"kind": each.kind, "reward": each.reward, "reason": each.reason} for each in outcomes]
            return {"outcomes": rows, "changes": changes}

        if self._function.is_async:
            self._side.call(number, lambda: self._score_async(samples), form, is_async=True)
        else:
            self._side.call(number, lambda: self._score(samples), form)

    def _load(self, setup: Message) -> Message:
        if setup["memory_limit_bytes"]:
            resource.setrlimit(resource.RLIMIT_AS, (setup["memory_limit_bytes"],) * 2)
        self._function = load_reward(setup["path"], group=setup["group"])
        self._args, self._timeout_s = SandboxArgs(setup["args"], setup["omitted"]), setup["timeout_s"]
        function = self._function
        return {"style": function.style, "is_async": function.is_async, "where": location_of(function.call)}

    def _score(self, samples: Sequence[Sample]) -> list[Outcome]:
        assert self._function is not None
        try:
            value = self._function.evaluate(self._args, samples)
            if isinstance(value, Awaitable):  # of a function that is not declared async
                value = asyncio.run(_awaited(value))  # pyright: ignore[reportUnknownArgumentType]
        except BaseException as error:
            if not is_raised_by_user(error):
                raise
            return [Outcome.failed(describe_exception(error))] * len(samples)
        return self._function.outcomes(value, len(samples))

    async def _score_async(self, samples: Sequence[Sample]) -> list[Outcome]:
        assert self._function is not None
        scoring = asyncio.create_task(self._function.score(self._args, samples))
        try:
            done, _ = await asyncio.wait({scoring}, timeout=self._timeout_s)
        finally:
            scoring.cancel()
        if done:
            return scoring.result()
        details = f"it did not return from {location_of(self._function.call)}"
        return [Outcome.timed_out(self._timeout_s, details=details)] * len(samples)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def split_args(args: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Split `args` (a mapping, or an object with `as_dict` or attributes) into JSON values and types of the rest."""
    if args is None:
        return {}, {}
    if isinstance(args, Mapping):
        items = dict(args)
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
    """The options of the run for user code, as read-only attributes.

    >>> args = SandboxArgs({"rm_type": "math"})
    >>> args.rm_type, getattr(args, "no_such", 1)
    ('math', 1)
    """

    def __init__(self, values: Mapping[str, Any], omitted: Mapping[str, str] | None = None) -> None:
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_omitted", dict(omitted or {}))

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        if name in values:
            return values[name]
        if kind := object.__getattribute__(self, "_omitted").get(name):
            raise AttributeError(f"args.{name} is a {kind}, which cannot be passed to the reward sandbox")
        raise AttributeError(f"there is no option {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args is read-only; args.{name} cannot be set to {value!r}")

    def __contains__(self, name: str) -> bool:
        return name in object.__getattribute__(self, "_values")

    def __repr__(self) -> str:
        return f"Args({object.__getattribute__(self, '_values')!r})"
