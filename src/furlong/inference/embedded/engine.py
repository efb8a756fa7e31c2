"""`EmbeddedEngine`: the Engine interface over a slot batch, with one thread that runs the model.

`submit` queues a request from an event loop, the engine thread (`engine_thread.py`) admits and decodes it, and
`deliver` wakes the caller's event loop. Pauses, aborts and weight loads are commands that the thread executes between
decode steps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig

from furlong.core.text import abbreviate
from furlong.core.weights import NamedTensor, WeightSource
from furlong.errors import EngineError
from furlong.inference.embedded.decode_model import ExpectedChecksums, WeightLoad, bucketed_length
from furlong.inference.embedded.engine_thread import EngineThread, on_loop, settler
from furlong.inference.embedded.model_loading import eos_ids, kv_tokens_that_fit, model_from_folder, model_from_state
from furlong.inference.embedded.request import Finished, Progress, Request, RequestError, check_params
from furlong.inference.embedded.slot_batch import KvPolicy, SlotBatch
from furlong.interfaces import Completion, Engine, PauseMode, SamplingParams, TextTokenizer
from furlong.models.model_facts import length_limit

T = TypeVar("T")

UNSEEDED = 1 << 63


@dataclass(frozen=True)
class EngineStats:
    """Counters of the engine. `busy_s` is the time in which the model ran; rates are relative to it."""

    running: int
    waiting: int
    version: int
    cached_tokens: int
    tokens_generated: int
    prefilled_tokens: int
    busy_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per busy second since the start."""
        return self.tokens_generated / self.busy_s if self.busy_s else 0.0


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
        kv_tokens: Limit of num_slots x cache length (default: 30 % of the free memory).
        prefill_tokens: Limit of one prefill.
        kv_policy: After a weight load, "recompute" rebuilds the KV cache of running requests with the new weights;
            "keep" continues with the old cache.
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
    ) -> None:
        if (model_dir is None) == (config is None or state_dict is None):
            raise EngineError("pass either model_dir, or both config and state_dict")
        if num_slots < 1 or prefill_tokens < 1:
            raise EngineError(f"num_slots is {num_slots}, prefill_tokens is {prefill_tokens}; both must be >= 1")
        if model_dir is not None:
            config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True)
        self.config: Any = config
        self.device, self.dtype = torch.device(device), dtype
        self.context_len = _context_len(config, context_len)
        length = bucketed_length(self.context_len)
        options: dict[str, Any] = {"dtype": dtype, "device": self.device, "max_length": length}
        self.model = (
            model_from_folder(model_dir, config, **options)
            if model_dir is not None
            else model_from_state(config, state_dict or {}, **options)
        )
        if return_routed_experts and self.model.routing is None:
            raise EngineError(
                f"{self.model.description} has no experts, so no routing can be returned; use "
                "--no-log-routing-agreement, or start `furlong serve` without --enable-return-routed-experts"
            )
        self.model.records_routes = return_routed_experts
        self.model_dir, self.tokenizer = model_dir, tokenizer
        self.eos_ids = eos_ids(config, model_dir, tokenizer)
        budget = kv_tokens or kv_tokens_that_fit(config, dtype=dtype, device=self.device)
        self._batch = SlotBatch(
            self.model,
            num_slots=num_slots,
            kv_tokens=max(budget, 4 * torch.get_num_threads() * length),
            prefill_tokens=prefill_tokens,
            tokenizer=tokenizer,
        )
        self.kv_policy: KvPolicy = kv_policy
        self._seed, self._counter = seed % UNSEEDED, itertools.count()
        self._partial: tuple[int, WeightLoad] | None = None
        self._thread = EngineThread(self._batch)

    # -- the Engine interface ----------------------------------------------------------------------------------

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Complete `prompt`. Raises EngineError for an invalid prompt or invalid parameters."""
        return (await self.submit(prompt, params, session=session)).completion

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        rid: str | None = None,
        session: str | None = None,
        report: Callable[[Progress], None] | None = None,
    ) -> Finished:
        """`generate` with a request id for `abort_request`, and a callback for new tokens on the caller's event loop.

        Cancelling the caller aborts the request.
        """
        self._thread.check_open()
        if self._thread.blocked is not None and self._partial is None:
            raise EngineError(self._thread.blocked)
        self.check(prompt, params)
        number = next(self._counter)
        rid = rid if rid is not None else f"furlong-{number}"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Finished] = loop.create_future()

        def notify(progress: Progress) -> None:
            assert report is not None
            on_loop(loop, partial(report, progress))

        key = (
            (params.sampling_seed % (1 << 64), 0)
            if params.sampling_seed is not None
            else (self._seed, UNSEEDED | number)
        )
        request = Request(
            rid=rid,
            session=session,
            prompt=tuple(prompt),
            params=params,
            stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)))),
            limit=min(params.max_new_tokens, self.context_len - len(prompt)),
            key=key,
            deliver=settler(future),
            report=None if report is None else notify,
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

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. With "finish", running requests finish; queued ones wait for `resume`."""
        thread = self._thread
        if mode == "finish":
            await thread.drain()
        elif mode == "hold":
            await thread.execute(lambda: thread.set_running(admitting=False, stepping=False))
        elif mode == "abort":
            await thread.execute(
                lambda: (thread.set_running(admitting=False, stepping=False), self._batch.abort(lambda _: True))
            )
        else:
            raise EngineError(f"pause mode is {mode!r}; use finish, hold or abort")

    async def resume(self) -> None:
        """Generate again after `pause`. Raises EngineError if a weight load is incomplete."""
        if self._thread.blocked is not None:
            raise EngineError(self._thread.blocked)
        await self._thread.execute(lambda: self._thread.set_running(admitting=True, stepping=True))

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

        return await self._thread.execute(lambda: self._or_fail_all(load))

    async def load_bucket(self, tensors: Sequence[NamedTensor], version: int) -> bool:
        """Load part of the weights; returns whether `version` is complete, which activates it.

        Nothing is generated until then. A bucket of another version, or with a tensor that was loaded before, starts
        over: the version is sent again after another engine failed.
        """

        def load() -> bool:
            if self._partial is None or self._partial[0] != version or self._partial[1].has_any(tensors):
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

        return await self._thread.execute(lambda: self._or_fail_all(load))

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
        await self._thread.close()

    # -- beyond the interface ----------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._batch.version

    @property
    def has_weights(self) -> bool:
        """Whether the weights of `version` are complete: neither released nor partially replaced."""
        return self._thread.blocked is None

    @property
    def num_slots(self) -> int:
        """Maximum number of concurrently decoded requests."""
        return self._batch.num_slots

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return not self._thread.is_admitting

    async def set_version(self, version: int) -> None:
        """Change the version number of the weights in use."""
        await self._thread.execute(lambda: self._batch.new_weights(version, "keep"))

    async def abort_request(self, rid: str | None = None) -> int:
        """Abort one request, or all for None; returns how many. Their finish_reason is "abort"."""
        return await self._abort(lambda r: rid is None or r.rid == rid)

    async def _abort(self, is_selected: Callable[[Request], bool]) -> int:
        self._thread.hand_over_all()
        return await self._thread.execute(lambda: self._batch.abort(is_selected))

    async def release_memory(self, *, weights: bool, cache: bool) -> int:
        """Release the memory of weights and cache; returns the number of bytes.

        Raises EngineError while there are requests. Released weights must be resumed and loaded again.
        """

        def release() -> int:
            stats = self.stats()
            if stats.running or stats.waiting:
                raise EngineError(
                    f"{stats.running} requests are running and {stats.waiting} queued; wait until the engine is idle"
                )
            freed = self._batch.drop_cache() if cache else 0
            if weights and not self.model.table.is_released:
                self._incomplete("they were released; resume their memory and load a version")
                self._partial = None
                freed += self.model.table.release()
            return freed

        return await self._thread.execute(release)

    async def resume_memory(self, *, weights: bool) -> None:
        """Allocate released weights again; the cache grows on demand. Nothing runs until a version is loaded."""
        if weights:
            await self._thread.execute(self.model.table.restore)

    async def forget_prefixes(self) -> None:
        """Drop the cached prompts of queued requests."""
        await self._thread.execute(self._batch.forget_prefixes)

    async def checksums(self) -> dict[str, str]:
        """`core.weights.checksum` of each tensor in use, by Hugging Face name."""
        return await self._thread.execute(self.model.table.checksums)

    async def resident_checksums(self) -> dict[str, str]:
        """Checksum of each tensor in use, as returned by `load_weights`."""
        return await self._thread.execute(self.model.table.resident_checksums)

    async def weight(self, name: str) -> Tensor:
        """A copy of one tensor. Raises SyncError for an unknown name."""
        return await self._thread.execute(lambda: self.model.table.view(name).clone())

    def expected_checksums(self) -> ExpectedChecksums:
        """Compute the checksums that `load_weights` returns for given tensors."""
        return ExpectedChecksums(self.model.table)

    def queue_lengths(self) -> dict[str, int]:
        """Return numbers of running and waiting requests; thread-safe."""
        return {"engine running": len(self._batch.running), "engine waiting": self._thread.num_waiting}

    def stats(self) -> EngineStats:
        """A snapshot of the counters; thread-safe."""
        batch = self._batch
        return EngineStats(
            running=len(batch.running),
            waiting=self._thread.num_waiting,
            version=batch.version,
            cached_tokens=batch.cached_tokens,
            tokens_generated=batch.tokens_generated,
            prefilled_tokens=batch.prefilled_tokens,
            busy_s=self._thread.busy_s,
        )

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise RequestError if `submit` would reject this."""
        check_params(params, self.tokenizer)
        if params.return_routed_experts and not self.model.records_routes:
            raise RequestError(
                "return_routed_experts is set, but this engine does not record them; start it with "
                "--enable-return-routed-experts"
            )
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token")
        if len(prompt) >= self.context_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_new_tokens is {params.max_new_tokens}, but the context "
                f"length is {self.context_len}; shorten the prompt or raise the context length"
            )
        vocab = self.model.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise RequestError(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}, but the model's vocabulary is 0 .. "
                f"{vocab - 1}; tokenizer and model do not match"
            )


def _context_len(config: Any, requested: int | None) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if requested is None and longest is None:
        raise EngineError(f"model type {config.model_type} has no max_position_embeddings; pass context_len")
    if requested is not None and (requested < 2 or (longest is not None and requested > longest)):
        raise EngineError(f"context_len is {requested}, but the model supports 2 .. {longest} positions")
    chosen = requested if requested is not None else int(longest or 0)
    limit = length_limit(config)
    if limit is not None and chosen > limit:
        raise EngineError(
            f"the context length is {chosen}, but model type {config.model_type} changes its rotary frequencies beyond "
            f"{limit} tokens, also for tokens that are already cached; use --rollout-max-context-len {limit} "
            f"(`furlong serve`: --context-length {limit}), or use SGLang"
        )
    return chosen
