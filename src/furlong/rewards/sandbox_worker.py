"""Worker process of `rewards.sandbox`: runs one reward function and exchanges frames over stdin and stdout.

A frame is a length in four bytes (big-endian) followed by that many bytes of JSON; nothing is pickled. The worker exits
at the end of stdin, so it never outlives the driver.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from typing import Any

import orjson

from furlong.core.outcome import Outcome
from furlong.core.process_tree import close_in_forked_children, die_with_parent, end_group_at_end_of
from furlong.core.sample import Sample, changed_fields
from furlong.core.user_code import describe_exception, frame_place, location_of, user_frame
from furlong.rewards.custom_reward import CustomReward, load_reward

HEADER = struct.Struct(">I")
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_REQUEST: contextvars.ContextVar[int | None] = contextvars.ContextVar("request", default=None)

Message = dict[str, Any]


def main() -> None:
    """Load the function named in the first frame, then serve requests until the end of stdin."""
    source, sink = _take_over_pipes()
    setup = _read(source)
    if setup is None:
        return
    die_with_parent(setup["parent_pid"])
    end_group_at_end_of(setup["run_pipe"])
    close_in_forked_children(source, sink)
    _run(setup, source, _writer(sink))


def _run(setup: Message, source: int, write: Callable[[Message], None]) -> None:
    try:
        if setup["memory_limit_bytes"]:
            resource.setrlimit(resource.RLIMIT_AS, (setup["memory_limit_bytes"],) * 2)
        function = load_reward(setup["path"], group=setup["group"])
    except BaseException as error:  # noqa: BLE001  the driver raises it
        write({"error": str(error) if type(error).__name__ == "RewardError" else describe_exception(error)})
        return
    write({"style": function.style, "is_async": function.is_async, "where": location_of(function.call)})
    signal.signal(signal.SIGUSR1, lambda _, frame: _report_hang(write, frame))
    args = SandboxArgs(setup["args"], setup["omitted"])
    asyncio.run(_serve(_RewardCall(function, args, write, setup["timeout_s"]), source))


@dataclass(frozen=True)
class _RewardCall:
    """How to answer a request: the function, its `args`, where replies go, and the limit."""

    function: CustomReward
    args: SandboxArgs
    write: Callable[[Message], None]
    timeout_s: float


async def _serve(call: _RewardCall, source: int) -> None:
    """Answer requests: concurrently for an async function, one by one for a sync function."""
    requests: asyncio.Queue[Message] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_listen, args=(source, loop, requests), daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    while True:
        request = await requests.get()
        task = asyncio.create_task(_answer(call, request))
        running.add(task)
        task.add_done_callback(running.discard)
        if not call.function.is_async:
            await task


def _listen(source: int, loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[Message]) -> None:
    """Read frames in a separate thread, to notice the end of the driver while user code runs."""
    try:
        while (request := _read(source)) is not None:
            loop.call_soon_threadsafe(requests.put_nowait, request)
    except OSError:  # user code closed the pipe
        os._exit(1)
    os._exit(0)


async def _answer(call: _RewardCall, request: Message) -> None:
    """Score the samples of a request and reply."""
    _REQUEST.set(request["id"])
    before = orjson.loads(encode_frame(request["samples"])[HEADER.size :])  # a copy: user code may change its samples
    samples = [Sample.from_dict(data) for data in request["samples"]]
    scoring = asyncio.create_task(call.function.score(call.args, samples))
    done, _ = await asyncio.wait({scoring}, timeout=call.timeout_s if call.function.is_async else None)
    if done:
        outcomes = scoring.result()
    else:
        scoring.cancel()
        details = f"it did not return from {location_of(call.function.call)}"
        outcomes = [Outcome.timed_out(call.timeout_s, details=details)] * len(samples)
    try:
        changes = [changed_fields(sample, old) for sample, old in zip(samples, before, strict=True)]
        _reply(call.write, request["id"], outcomes, changes)
    except (AttributeError, TypeError, ValueError) as error:
        where = location_of(call.function.call)
        reason = f"the reward or the changed sample cannot be returned from the sandbox: {error} ({where})"
        _reply(call.write, request["id"], [Outcome.failed(reason)] * len(samples), [{} for _ in samples])


def _reply(
    write: Callable[[Message], None], number: int, outcomes: Sequence[Outcome], changes: Sequence[dict[str, Any]]
) -> None:
    write({"id": number, "outcomes": [_as_dict(outcome) for outcome in outcomes], "changes": changes})


def _as_dict(outcome: Outcome) -> Message:
    return {"kind": outcome.kind, "reward": outcome.reward, "reason": outcome.reason}


def _report_hang(write: Callable[[Message], None], frame: FrameType | None) -> None:
    """Report which request is running, and where, and exit. The driver signals this when a call is overdue.

    A Python signal handler runs in the context of the interrupted code, so the context variable identifies the request.
    """
    user = user_frame(frame)
    write({"hung": _REQUEST.get(), "where": "" if user is None else frame_place(user)})
    os._exit(1)


def _take_over_pipes() -> tuple[int, int]:
    """Hide the pipes from user code: redirect its stdout to stderr and its stdin to /dev/null."""
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]  stdout is a TextIOWrapper here
    return source, sink


def _read(source: int) -> Message | None:
    """Read one frame. Return None at the end of the stream."""
    head = _read_exactly(source, HEADER.size)
    if head is None:
        return None
    body = _read_exactly(source, HEADER.unpack(head)[0])
    return None if body is None else orjson.loads(body)


def _read_exactly(source: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = os.read(source, min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _writer(sink: int) -> Callable[[Message], None]:
    def write(message: Message) -> None:
        view = memoryview(encode_frame(message))
        while view:
            view = view[os.write(sink, view) :]

    return write


def encode_frame(message: Any) -> bytes:
    """Encode one message. Raises TypeError with the type that JSON cannot represent."""
    body = orjson.dumps(message, default=_json_value, option=_OPTIONS)
    return HEADER.pack(len(body)) + body


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
            values[str(name)] = orjson.loads(orjson.dumps(value, default=_json_value, option=_OPTIONS))
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


def _json_value(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
