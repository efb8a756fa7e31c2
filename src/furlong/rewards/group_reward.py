"""Score the samples of a group with built-in verifiers, a reward server or custom functions."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from furlong.core.event_loop import call_in_thread
from furlong.core.outcome import Outcome, outcome_from_value
from furlong.core.sample import Sample, Status
from furlong.core.text import redact_credentials
from furlong.core.user_code import describe_exception
from furlong.errors import ConfigError
from furlong.rewards.custom_reward import CustomReward, custom_reward, load_reward
from furlong.rewards.sandbox import Limits, Sandbox
from furlong.rewards.verifiers import Verifier, find_verifier, random_score

if TYPE_CHECKING:
    import httpx  # slow to import, and only callers with a client need it

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 256  # calls of functions in this process
MAX_REQUESTS = 64  # concurrent requests to a reward server
CONNECT_RETRIES = 2  # for connecting only: a request is never sent twice
MAX_REPLY_BYTES = 16 << 20  # of a reward server
YIELD_INTERVAL = 256  # samples after which quick verifiers, which run in the event loop's thread, yield to other tasks
SHOWN_CHARS = 200  # of a server's reply in messages

RAISED = re.compile(r"(?!DataError)\w+: ")  # an exception of an answer's algebra; DataError is about the label
ABORTED = Outcome.failed("not scored: the sample was aborted")


class GroupReward:
    """Computes the rewards of a run.

    A sample is scored by the first of these that applies:

    1. the reward already set on the sample (by a custom generate function),
    2. `sample.custom_rm_path`,
    3. `custom_rm`: a path (called in the sandbox, or in the driver with `in_process`) or a callable (in the driver),
    4. the verifier named by `sample.metadata["rm_type"]`,
    5. the verifier `rm_type`,
    6. the number `default`.

    Aborted samples are not scored. `timeout_s` limits one call: one sample, or the whole group for functions
    of a group. `group_rm` calls slime-style custom functions with the list of samples. `args` is passed to custom
    functions. Instances with the same `verifier_sandboxes` share the workers of their verifiers, need equal limits and
    are closed together. Call `close` at the end.

    >>> reward = GroupReward(rm_type="f1")
    >>> asyncio.run(reward([Sample(response="in Paris", label="Paris")]))
    [Outcome(kind='scored', reward=0.6666666666666666, reason='', stage='reward')]
    """

    def __init__(
        self,
        *,
        rm_type: str | None = None,
        rm_url: str | None = None,
        custom_rm: str | Callable[..., Any] | None = None,
        group_rm: bool = False,
        timeout_s: float = 60.0,
        num_workers: int | None = None,
        memory_limit_bytes: int | None = None,
        in_process: bool = False,
        args: Any = None,
        default: float | None = None,
        verifier_sandboxes: dict[str, Sandbox] | None = None,
    ) -> None:
        self._verifier = find_verifier(rm_type) if rm_type else None
        if self._verifier is not None and self._verifier.kind == "server" and not rm_url:
            raise ConfigError(f"--rm-type {rm_type} needs a reward server; pass --rm-url http://host:port/path")
        self._limits = Limits(timeout_s=timeout_s, num_workers=num_workers, memory_limit_bytes=memory_limit_bytes)
        self._custom, self._group_rm, self._in_process, self._args = custom_rm, group_rm, in_process, args
        self._default = default
        self._remote = RemoteReward(rm_url, timeout_s=timeout_s) if rm_url else None
        self._sandboxes: dict[str, Sandbox] = {}
        self._verifier_sandboxes = {} if verifier_sandboxes is None else verifier_sandboxes
        self._functions: dict[str, CustomReward] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        if callable(custom_rm):
            name = getattr(custom_rm, "__qualname__", type(custom_rm).__name__)
            self._functions[""] = custom_reward(custom_rm, name=name, group=group_rm)
        elif custom_rm and in_process:
            self._functions[custom_rm] = load_reward(custom_rm, group=group_rm)

    async def start(self) -> None:
        """Load the custom function before the first sample. Raises RewardError if that fails."""
        if isinstance(self._custom, str) and not self._in_process:
            await self._sandbox(self._custom).start()

    async def __call__(self, group: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in order. Raises RewardError if a function cannot be loaded."""
        outcomes: list[Outcome | None] = [None] * len(group)
        by_function: dict[str, list[int]] = {}
        by_verifier: list[int] = []
        for i, sample in enumerate(group):
            if sample.status is Status.ABORTED:
                outcomes[i] = ABORTED
            elif sample.reward is not None:
                outcomes[i] = outcome_from_value(sample.reward)
            elif sample.custom_rm_path or self._custom:
                path = sample.custom_rm_path or (self._custom if isinstance(self._custom, str) else "")
                by_function.setdefault(path, []).append(i)
            else:
                by_verifier.append(i)
        jobs = [(rows, self._by_function(path, [group[i] for i in rows])) for path, rows in by_function.items()]
        if by_verifier:
            jobs.append((by_verifier, self._by_verifier([group[i] for i in by_verifier])))
        scored = [await jobs[0][1]] if len(jobs) == 1 else await asyncio.gather(*(job for _, job in jobs))
        for (rows, _), answers in zip(jobs, scored, strict=True):
            for i, outcome in zip(rows, answers, strict=True):
                outcomes[i] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    async def close(self) -> None:
        """End the workers and close connections."""
        for sandboxes in (self._sandboxes, self._verifier_sandboxes):
            for sandbox in sandboxes.values():
                await asyncio.to_thread(sandbox.close)
            sandboxes.clear()
        if self._remote is not None:
            await self._remote.close()

    def _sandbox(self, path: str) -> Sandbox:
        if path not in self._sandboxes:
            self._sandboxes[path] = Sandbox(path, limits=self._limits, group=self._group_rm, args=self._args)
        return self._sandboxes[path]

    async def _by_function(self, path: str, samples: Sequence[Sample]) -> list[Outcome]:
        if path and not self._in_process:
            return await self._sandbox(path).score(samples)
        if path not in self._functions:
            self._functions[path] = load_reward(path, group=self._group_rm)
        function = self._functions[path]
        answers = await asyncio.gather(*(self._call_here(function, call) for call in function.calls(samples)))
        return [outcome for answer in answers for outcome in answer]

    async def _call_here(self, function: CustomReward, samples: Sequence[Sample]) -> list[Outcome]:
        """Call a function in this process: async as a task, sync in a new thread, which cannot be stopped."""
        timeout_s = self._limits.timeout_s
        async with self._slots:
            if function.is_async:
                return await function.score_async(self._args, samples, timeout_s)
            answer = call_in_thread(lambda: function.score(self._args, samples), name=f"reward {function.name}")
            done, _ = await asyncio.wait({answer}, timeout=timeout_s)
            if not done:
                logger.warning(
                    "reward function %s still runs after %g s and occupies a thread; to have it stopped, pass "
                    "its path, so that it runs in the sandbox", function.name, timeout_s,
                )  # fmt: skip
                return [Outcome.timed_out(timeout_s)] * len(samples)
            outcomes, error = answer.result()
            if error is not None:
                raise error
            return outcomes

    async def _by_verifier(self, samples: Sequence[Sample]) -> list[Outcome]:
        outcomes: list[Outcome | None] = []
        pending: list[tuple[int, Any]] = []
        for i, sample in enumerate(samples):
            if i % YIELD_INTERVAL == YIELD_INTERVAL - 1:
                await asyncio.sleep(0)
            if self._default is not None and self._verifier is None and not sample.metadata.get("rm_type"):
                outcomes.append(Outcome.scored(self._default))
                continue
            try:
                verifier = self._verifier_of(sample)
                response = verifier.cut(sample.response)
                value = None
                if verifier.kind == "sample":
                    value = random_score(sample)
                elif verifier.quick is not None:
                    value = verifier.quick(response, sample.label, sample.metadata)
            except Exception as error:  # noqa: BLE001  reward boundary: an unusable label becomes an outcome
                outcomes.append(Outcome.failed(describe_exception(error).split("\n", 1)[0]))
                continue
            outcomes.append(None if value is None else Outcome.scored(value))
            if value is None:
                pending.append((i, self._score_slow(verifier, sample, response)))
        slow = await asyncio.gather(*(job for _, job in pending)) if pending else []
        for (i, _), outcome in zip(pending, slow, strict=True):
            outcomes[i] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def _verifier_of(self, sample: Sample) -> Verifier:
        if name := sample.metadata.get("rm_type"):
            return find_verifier(str(name))
        if self._verifier is None:
            raise ConfigError(
                "no reward is configured for this sample; pass --rm-type or --custom-rm-path, or set rm_type in the "
                "metadata of its row"
            )
        return self._verifier

    async def _score_slow(self, verifier: Verifier, sample: Sample, response: str) -> Outcome:
        if verifier.slow is not None:
            metadata = sample.metadata if verifier.wants_metadata else {}
            stripped = Sample(response=response, label=sample.label, metadata=metadata)  # no tokens or log-probs
            if verifier.slow not in self._verifier_sandboxes:
                self._verifier_sandboxes[verifier.slow] = Sandbox(verifier.slow, limits=self._limits)
            [outcome] = await self._verifier_sandboxes[verifier.slow].score([stripped])
            # The answer is nothing that sympy can compare, or not in time: it must not be a way to drop the sample.
            if outcome.kind == "timed_out" or (outcome.kind == "failed" and RAISED.match(outcome.reason)):
                logger.info(
                    "--rm-type %s gives 0 to an answer that it cannot compare: %s", verifier.name, outcome.reason
                )
                return Outcome("scored", 0.0, outcome.reason)
            return outcome
        if self._remote is None:
            return Outcome.failed(f"rm_type {verifier.name} needs a reward server; pass --rm-url")
        return await self._remote.score(sample, response)


class RemoteReward:
    """Client of a reward server, with at most 64 concurrent requests of up to `timeout_s` seconds each.

    It posts {prompt, response, label}; the reply is a number or a dict. For one event loop.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    async def score(self, sample: Sample, response: str) -> Outcome:
        """Score `response` with the prompt and label of the sample. Any failure is an outcome with the reason."""
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_connections=MAX_REQUESTS)
            transport = httpx.AsyncHTTPTransport(retries=CONNECT_RETRIES, limits=limits)
            self._client = httpx.AsyncClient(transport=transport, timeout=self._timeout_s)
        payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
        where = f"POST {redact_credentials(self._url)}"
        async with self._slots:
            try:
                async with (
                    asyncio.timeout(self._timeout_s),
                    self._client.stream("POST", self._url, json=payload) as reply,
                ):
                    return outcome_from_value(await read_json(reply, MAX_REPLY_BYTES))
            except (TimeoutError, httpx.TimeoutException):
                return Outcome.timed_out(self._timeout_s)
            except ReplyError as error:
                return Outcome.failed(f"{where}: {error}")
            except (httpx.HTTPError, httpx.InvalidURL, TypeError, ValueError) as error:
                return Outcome.failed(f"{where}: {redact_credentials(f'{type(error).__name__}: {error}')}")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
        self._client = None


class ReplyError(ValueError):
    """A reply is too large, does not decompress, is a redirect or an error, or not JSON. `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def read_json(reply: httpx.Response, limit_bytes: int) -> Any:
    """Read the JSON body of a streamed reply with a status of success.

    Raises ReplyError for another status, for more than `limit_bytes` after decompression, and for a body that is not
    JSON in UTF-8. httpx's errors of the transport pass through.
    """
    import httpx

    content, status = bytearray(), reply.status_code
    try:
        async for part in reply.aiter_bytes():
            content += part
            if len(content) > limit_bytes:
                raise ReplyError(f"the reply has more than {limit_bytes:,} bytes", status)
    except httpx.DecodingError as error:
        encoding = reply.headers.get("content-encoding", "")[:SHOWN_CHARS]
        raise ReplyError(f"the reply is not in its Content-Encoding {encoding!r}: {error}", status) from error
    text = content[: 4 * SHOWN_CHARS].decode(errors="replace")[:SHOWN_CHARS]
    shown = redact_credentials("".join(each if each.isprintable() else " " for each in text))
    if reply.is_redirect:
        target = redact_credentials(reply.headers.get("location", ""))[:SHOWN_CHARS]
        raise ReplyError(f"HTTP {status}, a redirect to {target!r}, which is not followed", status)
    if not reply.is_success:
        raise ReplyError(f"HTTP {status}: {shown}", status)
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ReplyError(f"the reply is not JSON: {shown} ({str(error)[:SHOWN_CHARS]})", status) from error
