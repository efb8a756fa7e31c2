"""`EmbeddedEngine`: the Engine interface over a slot batch, with one thread that runs the model.

Any thread can queue requests and commands. The engine's thread picks them up between two decode steps, so no lock is
held while the model runs. Pauses, aborts and weight loads are such commands. Results are delivered to the event loop
that waits for them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.text import abbreviate
from furlong.core.token_stream import TextTokenizer, TokenStream
from furlong.core.tracing import tracer
from furlong.core.weights import NamedTensor, WeightSource
from furlong.errors import EngineError, SyncError
from furlong.inference.embedded.decode_model import bucketed_length, score_tokens
from furlong.inference.embedded.model_loading import build_model, chosen_context_len, eos_ids, kv_tokens_that_fit
from furlong.inference.embedded.request import Finished, Progress, Request, TokenIds, check_request
from furlong.inference.embedded.slot_batch import EngineStats, KvPolicy, SlotBatch
from furlong.inference.embedded.structured import Grammar, Grammars
from furlong.inference.embedded.weight_table import WeightLoad
from furlong.inference.request_error import RequestError
from furlong.interfaces import Completion, Engine, PauseMode, SamplingParams, TokenScores
from furlong.models.hf_config import load_config

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNSEEDED = 1 << 63
PREFIX_TOKENS = 1 << 18  # kept for later calls by default


class EngineThread:
    """Runs `batch` until it is closed; the only thread that uses the batch and its model.

    blocked: Why nothing can be generated; None if it can.
    busy_s: Time in which the model ran.
    """

    def __init__(self, batch: SlotBatch) -> None:
        self.batch = batch
        self.blocked: str | None = None
        self.busy_s = 0.0
        self.is_admitting = True
        self._is_stepping = True
        self._is_closing = False
        self._wake = threading.Condition()
        self._incoming: list[Request] = []
        self._commands: list[Callable[[], Any]] = []
        self._drained: list[Callable[[None], None]] = []
        self._pending: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        self._thread = threading.Thread(target=self._run, name="furlong-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of queued requests."""
        pending = sum(map(len, list(self._pending.values())))
        return len(self.batch.waiting) + len(self._incoming) + pending

    def check_open(self) -> None:
        """Raise EngineError if the engine is closed."""
        if self._is_closing:
            raise EngineError("the embedded engine is closed; build a new one")

    def add(self, request: Request) -> None:
        """Queue a request.

        Requests from one iteration of an event loop are handed over together, so that equal prompts share a prefill.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._pending:
            self._pending[loop] = []
            loop.call_soon(self.hand_over, loop)
        self._pending[loop].append(request)

    def hand_over_all(self) -> None:
        """Hand over the requests of all event loops now."""
        for loop in list(self._pending):
            self.hand_over(loop)

    def hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand over the requests of `loop` now."""
        requests = self._pending.pop(loop, [])
        with self._wake:
            self._incoming += requests
            self._wake.notify()

    def post(self, command: Callable[[], Any]) -> None:
        """Run `command` on the thread between two decode steps."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """Fail unfinished requests with EngineError and wait for the end of the thread."""
        self.hand_over_all()
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def set_running(self, *, admitting: bool, stepping: bool) -> None:
        """Set whether queued requests are admitted and running ones decoded."""
        self.is_admitting, self._is_stepping = admitting, stepping

    def drain(self, answer: Callable[[None], None]) -> None:
        """Stop admitting requests; `answer` is called once none is running."""
        self.set_running(admitting=False, stepping=True)
        self._drained.append(answer)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests with `error`."""
        for request in self.batch.reset():
            known = isinstance(error, EngineError)
            failure = EngineError(str(error) if known else f"generation failed ({type(error).__name__}): {error}")
            failure.__cause__ = error
            request.deliver(failure)

    def _has_work(self) -> bool:
        if not self._is_stepping or self.blocked is not None:
            return False
        return bool(self.batch.running) or (self.is_admitting and bool(self.batch.waiting))

    def _interrupted(self) -> bool:
        has_free_slot = len(self.batch.running) < self.batch.num_slots
        return bool(self._commands) or self._is_closing or (bool(self._incoming) and has_free_slot)

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._is_closing:
                with self._wake:
                    while not (self._commands or self._incoming or self._is_closing or self._has_work()):
                        self._wake.wait()
                self._process_queues()
                if self._has_work() and not self._is_closing:
                    self._step()
                if not self.batch.running:
                    self._notify_drained()
            self._process_queues()
            self._notify_drained()
            for request in self.batch.reset():
                request.deliver(EngineError(f"the embedded engine was closed before request {request.rid} finished"))

    def _process_queues(self) -> None:
        with self._wake:
            commands, self._commands = self._commands, []
            incoming, self._incoming = self._incoming, []
        self.batch.add(incoming)
        for command in commands:
            command()

    def _notify_drained(self) -> None:
        for answer in self._drained:
            answer(None)
        self._drained.clear()

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            with tracer.span("engine busy", running=len(self.batch.running)):
                self.batch.run(admit=self.is_admitting, interrupted=self._interrupted)
        except Exception as error:
            message = "a step of the embedded engine failed; all its requests fail with this error"
            if isinstance(error, EngineError):
                logger.error("%s: %s", message, str(error).splitlines()[0])  # the requests raise the full text
            else:
                logger.exception(message)
            self.fail_all(error)
        self.busy_s += time.perf_counter() - began


def settler(future: asyncio.Future[T]) -> Callable[[T | Exception], None]:
    """Return a thread-safe function that sets the result or error of `future`."""

    def settle(result: T | Exception) -> None:
        if future.done():
            return  # the caller was cancelled
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    return lambda result: call_on_loop(future.get_loop(), settle, result)


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
    """Call `function` on `loop`; does nothing if the loop was closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
        logger.warning("the event loop of a request was closed before it finished")


class EmbeddedEngine(Engine):
    """Generate with a model in this process (PyTorch, CPU or CUDA).

    Args:
        model_dir: A checkpoint folder. Alternatively pass `config` and `state_dict`.
        num_slots: Requests decoded concurrently.
        context_len: Maximum tokens of prompt and response (default: the config's max_position_embeddings).
        tokenizer: Needed for stop strings and `Completion.text`.
        seed: Seed for requests without a `sampling_seed`.
        config: A transformers config.
        state_dict: Weights under Hugging Face names.
        kv_tokens: Limit of num_slots x cache length (default: 30 % of the free memory, 40 % on a GPU).
        prefill_tokens: Limit of one prefill.
        kv_policy: After a weight load, "recompute" rebuilds the KV cache of running requests with the new weights and
            drops the kept prompts; "keep" continues with both.
        prefix_tokens: Limit of the prompt positions kept for later calls with their `prefix_key`; None: a third of
            `kv_tokens`, at most `PREFIX_TOKENS`; 0: none.
        return_routed_experts: Requests may ask for routed experts. Raises EngineError for a model without experts.

    >>> engine = EmbeddedEngine(Path("model"), dtype=torch.float32)                      # doctest: +SKIP
    >>> completion = await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=8))  # doctest: +SKIP
    """

    def __init__(
        self,
        model_dir: Path | None = None,
        *,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        num_slots: int = 128,
        context_len: int | None = None,
        tokenizer: TextTokenizer | None = None,
        seed: int = 0,
        config: Any = None,
        state_dict: Mapping[str, Tensor] | None = None,
        kv_tokens: int | None = None,
        prefill_tokens: int = 4096,
        kv_policy: KvPolicy = "recompute",
        return_routed_experts: bool = False,
        prefix_tokens: int | None = None,
    ) -> None:
        if (model_dir is None) == (config is None or state_dict is None):
            raise EngineError("pass either model_dir, or both config and state_dict")
        if num_slots < 1 or prefill_tokens < 1:
            raise EngineError(f"num_slots is {num_slots}, prefill_tokens is {prefill_tokens}; both must be >= 1")
        if model_dir is not None:
            config = load_config(model_dir)
        self.config: Any = config
        self.device, self.dtype, self.num_slots = torch.device(device), dtype, num_slots
        self.context_len = chosen_context_len(config, context_len)
        length = bucketed_length(self.context_len)
        weights = model_dir if model_dir is not None else state_dict or {}
        self.model = build_model(config, weights, dtype=dtype, device=self.device, max_length=length)
        if return_routed_experts and self.model.routing is None:
            raise EngineError(
                f"{self.model.description} has no experts, so no routing can be returned; use "
                "--no-log-routing-agreement, or start `furlong serve` without --enable-return-routed-experts"
            )
        self.model.records_routes = return_routed_experts
        self.model_dir, self.tokenizer = model_dir, tokenizer
        self.eos_ids = eos_ids(config, model_dir, tokenizer)
        budget = kv_tokens or kv_tokens_that_fit(config, dtype=dtype, device=self.device)
        least = 0 if self.model.captures_steps else 4 * torch.get_num_threads() * length  # rows of the smallest batch
        self._batch = SlotBatch(
            self.model,
            num_slots=num_slots,
            kv_tokens=max(budget, least),
            prefill_tokens=prefill_tokens,
            tokenizer=tokenizer,
            prefix_tokens=min(PREFIX_TOKENS, budget // 3) if prefix_tokens is None else prefix_tokens,
        )
        self.kv_policy: KvPolicy = kv_policy
        self._seed, self._counter = seed % UNSEEDED, itertools.count()
        self._grammars = Grammars(self.tokenizer, self.model.vocab_size)
        self._partial: tuple[int, WeightLoad] | None = None
        self._thread = EngineThread(self._batch)

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Complete `prompt`. Raises EngineError for an invalid prompt or invalid parameters."""
        return (await self.submit(prompt, params, session=session)).completion

    async def stream(
        self, prompt: list[int], params: SamplingParams, tokens: TokenStream, *, session: str | None = None
    ) -> Completion:
        """`generate`, and put the tokens into `tokens` after each decode step."""
        if tokens.is_stopped:
            self.check(prompt, params)
            return Completion([], [], [], "abort")
        rid, num_tokens = f"stream-{id(tokens)}", 0

        def report(progress: Progress) -> None:
            nonlocal num_tokens
            tokens.put(num_tokens, progress.tokens, progress.log_probs)
            num_tokens += len(progress.tokens)

        def abort() -> None:
            self._thread.hand_over_all()
            self._thread.post(lambda: self._batch.abort(lambda other: other.rid == rid))

        tokens.set_abort(abort)
        try:
            return (await self.submit(prompt, params, rid=rid, session=session, report=report)).completion
        finally:
            tokens.set_abort(None)

    async def grammar_of(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of a new request; None without a schema. Raises RequestError."""
        if params.json_schema is None:
            return None
        return await asyncio.to_thread(self._grammars.compile, params.json_schema, self._stop_ids(params))

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids))))

    async def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        rid: str | None = None,
        session: str | None = None,
        report: Callable[[Progress], None] | None = None,
        is_checked: bool = False,
    ) -> Finished:
        """`generate` with a request id for `abort_request`, and a callback for new tokens on the caller's event loop.

        Cancelling the caller aborts the request. `is_checked`: the caller has called `check`.
        """
        self._thread.check_open()
        if self._thread.blocked is not None and self._partial is None:
            raise EngineError(self._thread.blocked)
        if not is_checked:
            self.check(prompt, params)
        number = next(self._counter)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Finished] = loop.create_future()
        seed = params.sampling_seed
        stop_ids = self._stop_ids(params)
        grammar = await self.grammar_of(params)
        request = Request(
            rid=rid if rid is not None else f"furlong-{number}",
            session=session,
            prompt=TokenIds(prompt),
            params=params,
            stop_ids=stop_ids,
            limit=min(params.max_new_tokens, self.context_len - len(prompt)),
            key=(self._seed, UNSEEDED | number) if seed is None else (seed % (1 << 64), 0),
            deliver=settler(future),
            report=None if report is None else lambda progress: call_on_loop(loop, report, progress),
            grammar=grammar,
        )
        if request.limit == 0:
            return request.finish("length", self.tokenizer)
        self._thread.add(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._thread.hand_over(loop)
            self._thread.post(lambda: self._batch.abort(lambda other: other is request))
            raise

    async def score(
        self,
        tokens: Sequence[int],
        num_scored: int,
        *,
        temperature: float = 1.0,
        num_top: int = 0,
        ids_RK: NDArray[np.int32] | None = None,
    ) -> TokenScores:
        """Return log-probs of the last `num_scored` tokens, from a separate pass between two decode steps."""
        self.check(tokens, SamplingParams(max_new_tokens=0, temperature=temperature))
        if not 0 < num_scored < len(tokens):
            raise RequestError(f"{num_scored} of {len(tokens)} tokens cannot be scored; the first has no log-prob")

        def score() -> TokenScores:
            if self._thread.blocked is not None:
                raise EngineError(self._thread.blocked)
            return score_tokens(
                self.model, tokens, num_scored, temperature=temperature or 1.0, num_top=num_top, ids_RK=ids_RK
            )

        return await self.execute(score)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. With "finish", running requests finish; queued ones wait for `resume`."""
        thread = self._thread
        if mode == "finish":
            drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            answer = settler(drained)
            await self.execute(lambda: thread.drain(answer))
            await drained
        elif mode == "hold":
            await self.execute(lambda: thread.set_running(admitting=False, stepping=False))
        elif mode == "abort":
            await self.execute(
                lambda: (thread.set_running(admitting=False, stepping=False), self._batch.abort(lambda _: True))
            )
        else:
            raise EngineError(f"pause mode is {mode!r}; use finish, hold or abort")

    async def resume(self) -> None:
        """Generate again after `pause`. Raises EngineError if a weight load is incomplete."""
        if self._thread.blocked is not None:
            raise EngineError(self._thread.blocked)
        await self.execute(lambda: self._thread.set_running(admitting=True, stepping=True))

    async def abort(self, sessions: Collection[str]) -> None:
        """Abort the running and queued requests of these sessions; each returns the tokens it has."""
        if isinstance(sessions, str):
            raise EngineError(f"abort expects a collection of sessions, got the string {sessions!r}; pass a list")
        names = frozenset(sessions)
        await self._abort(lambda r: r.session in names)

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        """Replace the weights between two decode steps; returns checksums of the stored tensors.

        After a SyncError the weights are mixed, and the engine refuses to generate until a load succeeds.
        """

        def load() -> dict[str, str]:
            self._partial = None
            try:
                checksums = self.model.table.load(source)
            except BaseException:  # only now: requests that arrive meanwhile wait for the weights
                self._incomplete(f"loading version {version} failed; load a complete model again")
                raise
            self._loaded(version)
            return checksums

        return await self.execute(lambda: self._or_fail_all(load))

    async def load_bucket(self, tensors: Sequence[NamedTensor], version: int) -> bool:
        """Load part of the weights; returns whether `version` is complete, which activates it.

        Nothing is generated until then. A bucket of another version, or with a tensor that was loaded before, starts
        over: the version is sent again after another engine failed. Raises EngineError for an empty bucket and
        SyncError for an unknown, repeated or mis-shaped tensor, before anything is changed.
        """
        if not tensors:
            raise EngineError(f"the bucket for weight version {version} has no tensors; send at least one")
        names = {name for name, _ in tensors}
        if len(names) < len(tensors):
            raise SyncError(f"the bucket for weight version {version} repeats a tensor; send every name once")

        def check() -> None:
            for name, tensor in tensors:
                self.model.table.check_shape(name, tensor.shape)
                if tensor.dtype.is_complex:
                    raise SyncError(f"tensor {name!r} has dtype {tensor.dtype}; send real numbers")

        def load() -> bool:
            if self._partial is None or self._partial[0] != version or names & self._partial[1].loaded.keys():
                self._partial = (version, WeightLoad(self.model.table))
            partial = self._partial[1]
            self._incomplete(f"loading version {version} failed part way; load a complete model again")
            for name, tensor in tensors:
                partial.put(name, tensor)
            if missing := partial.missing():
                self._incomplete(f"version {version} lacks {len(missing)} tensors: {abbreviate(missing)}; send them")
                return False
            self._loaded(version)
            self._partial = None  # last, so that a request that arrives meanwhile is not refused
            return True

        def check_and_load() -> bool:
            check()
            return self._or_fail_all(load)

        return await self.execute(check_and_load)

    def _incomplete(self, why: str) -> None:
        self._thread.blocked = f"the engine's weights are incomplete: {why}"

    def _or_fail_all(self, load: Callable[[], T]) -> T:
        """Run `load`; if it raises, fail all requests in the engine with the same error."""
        try:
            return load()
        except Exception as error:
            self._thread.fail_all(error)
            raise

    def _loaded(self, version: int) -> None:
        self._batch.new_weights(version, self.kv_policy)
        self._thread.blocked = None

    async def close(self) -> None:
        """Stop the thread; unfinished requests fail with EngineError."""
        await asyncio.to_thread(self._thread.stop)

    # -- beyond the interface ----------------------------------------------------------------------------------

    async def execute(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread, between two decode steps, and return its result."""
        self._thread.check_open()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answer = settler(future)

        def command() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001  raised in the caller
                answer(error)
            else:
                answer(result)

        self._thread.post(command)
        return await future

    @property
    def caches_prefixes(self) -> bool:
        """Whether prompts with a `prefix_key` are kept for the next one."""
        return self._batch.kept_prompts.max_tokens > 0

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._batch.version

    @property
    def has_weights(self) -> bool:
        """Whether the weights of `version` are complete: neither released nor partially replaced."""
        return self._thread.blocked is None

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return not self._thread.is_admitting

    async def forget_prefixes(self) -> None:
        """Drop the cached prompts of queued requests and sessions."""
        await self.execute(self._batch.forget_prefixes)

    async def set_version(self, version: int) -> None:
        """Change the version number of the weights in use."""
        await self.execute(lambda: self._batch.new_weights(version, "keep"))

    async def abort_request(self, rid: str | None = None) -> int:
        """Abort one request, or all for None; returns how many. Their finish_reason is "abort"."""
        return await self._abort(lambda r: rid is None or r.rid == rid)

    async def _abort(self, is_selected: Callable[[Request], bool]) -> int:
        self._thread.hand_over_all()
        return await self.execute(lambda: self._batch.abort(is_selected))

    async def release_memory(self, *, weights: bool, cache: bool) -> int:
        """Release the memory of weights and cache; returns the number of bytes.

        Raises EngineError while there are requests. Released weights must be allocated by `WeightTable.restore` and
        loaded again.
        """

        def release() -> int:
            if (stats := self.stats()).running or stats.waiting:
                raise EngineError(
                    f"{stats.running} requests are running and {stats.waiting} queued; wait until the engine is idle"
                )
            freed = self._batch.drop_cache() if cache else 0
            if weights and not self.model.table.is_released:
                self._incomplete("they were released; resume their memory and load a version")
                self._partial = None
                freed += self.model.table.release()
            return freed

        return await self.execute(release)

    def queue_lengths(self) -> dict[str, int]:
        """Return numbers of running and waiting requests; thread-safe."""
        return {"engine running": len(self._batch.running), "engine waiting": self._thread.num_waiting}

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters; thread-safe."""
        return self._batch.stats(waiting=self._thread.num_waiting, busy_s=self._thread.busy_s)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise RequestError if `submit` would reject this."""
        check_request(
            prompt,
            params,
            tokenizer=self.tokenizer,
            context_len=self.context_len,
            vocab_size=self.model.vocab_size,
            records_routes=self.model.records_routes,
        )
