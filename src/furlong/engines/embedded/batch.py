"""The slots of the engine: admit requests, decode them together, take out what has finished.

Runs on the engine's thread only. Active slots are 0..n-1: when one finishes, the last one moves into its place.
Axes: N active slots, V vocabulary, R response tokens.

A request in a slot has its new tokens in the journal (arrays over [slot, token]) until it leaves the slot.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.routing import Routes
from furlong.engines.embedded.request import (
    UNIFORM_CHUNK,
    Finished,
    Progress,
    Request,
    StopStrings,
    TextTokenizer,
    uniforms,
)
from furlong.engines.embedded.sampler import Sampler, SamplingRows
from furlong.errors import EngineError
from furlong.models.decode import LENGTH_BUCKET, DecodeModel, bucketed_length, padded_rows
from furlong.models.slot_cache import SlotCache

logger = logging.getLogger(__name__)

KvPolicy = Literal["recompute", "keep"]
StoredPrefix = tuple[list[tuple[Tensor, Tensor]], Tensor, Routes | None]  # keys and values, logits


class SlotBatch:
    """Continuous batching over a slot cache.

    `num_slots` requests decode together at most, fewer if their cached positions would exceed `kv_tokens`; then the
    newest ones are put back and recomputed later. A prompt is prefilled once for all requests that wait with it.
    """

    def __init__(
        self,
        model: DecodeModel,
        *,
        num_slots: int,
        kv_tokens: int,
        prefill_tokens: int,
        tokenizer: TextTokenizer | None,
    ) -> None:
        self.model = model
        self.num_slots, self.kv_tokens, self.prefill_tokens = num_slots, kv_tokens, prefill_tokens
        self.tokenizer = tokenizer
        self.version = 0
        self.waiting: deque[Request] = deque()
        self._wanted: Counter[tuple[int, ...]] = Counter()  # prefixes of waiting requests
        self.running: list[Request] = []
        self.tokens_generated = 0
        self.prefilled_tokens = 0
        self._sampler = Sampler(model.vocab_size)
        self._stop_strings = StopStrings(tokenizer)
        self._allocate()

    def _allocate(self) -> None:
        slots = padded_rows(self.num_slots)
        self._cache = SlotCache()
        self._steps_since_resize = 0
        self._prefixes: dict[tuple[int, ...], StoredPrefix] = {}
        self._rows: SamplingRows | None = None
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=self.model.device)
        self._row_numbers = np.arange(slots)
        self._positions = np.zeros(slots, np.int64)
        self._done = np.zeros(slots, np.int64)  # tokens in the journal
        self._before = np.zeros(slots, np.int64)  # response tokens from before the slot was taken
        self._limits = np.zeros(slots, np.int64)  # journal length at which the limit is reached
        self._minimums = np.zeros(slots, np.int64)  # journal length below which nothing stops the request
        self._reported = np.zeros(slots, np.int64)
        self._stop_ids = np.full((slots, 1), -1, np.int64)
        self._has_stop_strings = np.zeros(slots, np.bool_)
        self._uniforms = np.zeros((slots, UNIFORM_CHUNK))
        self._journal_tokens = np.zeros((slots, UNIFORM_CHUNK), np.int64)
        self._journal_log_probs = np.zeros((slots, UNIFORM_CHUNK), np.float32)
        self._routed = np.zeros(slots, np.int64)  # rows in the journal of routes
        shape = self.model.routing
        sizes = (shape.num_layers, shape.top_k) if shape is not None and self.model.records_routes else (0, 0)
        self._journal_routes = np.zeros((slots, UNIFORM_CHUNK, *sizes), np.int16)

    @property
    def cached_tokens(self) -> int:
        """Cached positions of running requests."""
        return int(self._positions[: len(self.running)].sum()) + len(self.running)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        for request in requests:
            self.waiting.append(request)
            self._wanted[request.prefix] += 1

    def drop_cache(self) -> int:
        """Give back the memory of cached positions while no request runs; returns its bytes."""
        assert not self.running
        freed = sum(tensor.nbytes for pair in self._cache.layers for tensor in pair)
        self._forget_prefixes()
        self._cache = SlotCache()
        return freed

    def reset(self) -> list[Request]:
        """Forget everything, memory included; returns the requests that were there."""
        dropped = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        self._wanted.clear()
        self._allocate()
        return dropped

    def abort(self, chosen: Callable[[Request], bool]) -> int:
        """End the chosen requests with what they have; returns how many."""
        gone = [request for request in self.waiting if chosen(request)]
        self.waiting = deque(request for request in self.waiting if not chosen(request))
        self._wanted = Counter(request.prefix for request in self.waiting)
        for request in gone:
            self._finish(request, "abort")
        slots = [slot for slot, request in enumerate(self.running) if chosen(request)]
        for slot in reversed(slots):
            self._leave(slot, "abort")
        self._forget_prefixes()
        return len(gone) + len(slots)

    def new_weights(self, version: int, policy: KvPolicy) -> None:
        """Note that the weights are now `version`.

        "recompute" puts running requests back in the queue, so that their cache is computed anew; "keep" lets them go
        on with the cache of the old weights.
        """
        if policy == "recompute":
            self.retract(len(self.running))
        else:
            for slot in range(len(self.running)):
                self._flush(slot)
        self._prefixes.clear()
        self.version = version

    def retract(self, count: int) -> None:
        """Put the `count` newest running requests back at the head of the queue, with their tokens."""
        for slot in range(len(self.running) - 1, len(self.running) - 1 - count, -1):
            self._flush(slot)
            request = self.running.pop()
            request.num_retractions += 1
            self.waiting.appendleft(request)
            self._wanted[request.prefix] += 1
            self._clear(slot)
        self._rows = None

    def forget_prefixes(self) -> None:
        """Drop stored prompts."""
        self._prefixes.clear()

    def run(self, *, admit: bool, interrupted: Callable[[], bool]) -> None:
        """Admit, then decode until a request finishes, one wants its tokens reported, or `interrupted`."""
        if admit:
            self.admit()
        before = len(self.running)
        while self.running and len(self.running) == before:
            self._decode_step()
            if any(request.report is not None for request in self.running) or interrupted():
                break
        self._report()

    # -- admission ---------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Move waiting requests into free slots and draw their first token."""
        while self.waiting and len(self.running) < self.num_slots:
            taken = self._take_waiting()
            if not taken:
                return
            first = len(self.running)
            logits = self._fill_slots(taken, first)
            self.running += taken
            for slot, request in enumerate(taken, first):
                self._occupy(slot, request)
            self._rows = None
            rows = SamplingRows.build([r.params for r in taken], self.model.vocab_size, self.model.device)
            self._draw(logits, rows, first)

    def _take_waiting(self) -> list[Request]:
        """The next requests that fit free slots, the cache budget and one prefill."""
        taken: list[Request] = []
        longest = int(self._positions[: len(self.running)].max(initial=0)) + 1
        prefill, seen = 0, set[tuple[int, ...]]()
        while self.waiting and len(self.running) + len(taken) < self.num_slots:
            request = self.waiting[0]
            prefix = request.prefix
            cost = 0 if prefix in seen or prefix in self._prefixes else len(prefix)
            occupied = len(self.running) + len(taken)
            longest = max(longest, len(prefix) + 1)
            if occupied and padded_rows(occupied + 1) * bucketed_length(longest + 1) > self.kv_tokens:
                break
            if taken and prefill + cost > self.prefill_tokens:
                break
            seen.add(prefix)
            prefill += cost
            taken.append(self.waiting.popleft())
            self._wanted[prefix] -= 1
            if not self._wanted[prefix]:
                del self._wanted[prefix]
        # Requests with one prefix become neighbours, so that their cache is filled by one copy.
        order = {prefix: i for i, prefix in enumerate(dict.fromkeys(r.prefix for r in taken))}
        return sorted(taken, key=lambda r: order[r.prefix])

    def _fill_slots(self, taken: list[Request], first: int) -> Tensor:
        """Prefill each distinct prefix once, copy it to its other slots; returns each request's logits [N, V]."""
        counts = Counter(request.prefix for request in taken)
        starts: dict[tuple[int, ...], int] = {}
        for slot, request in enumerate(taken, first):
            starts.setdefault(request.prefix, slot)
        longest = max(max(map(len, counts)), int(self._positions[:first].max(initial=0)) + 1)
        self._reserve(padded_rows(first + len(taken)), bucketed_length(longest + 1))
        fresh = [prefix for prefix in counts if prefix not in self._prefixes]
        logits: dict[tuple[int, ...], Tensor] = {}
        routes: dict[tuple[int, ...], Routes] = {}
        if fresh:
            rows = self.model.prefill(fresh, self._cache, [starts[prefix] for prefix in fresh])
            logits = dict(zip(fresh, rows, strict=True))
            if self.model.records_routes:
                routes = dict(zip(fresh, self.model.routes, strict=True))
            self.prefilled_tokens += sum(map(len, fresh))
        for prefix, count in counts.items():
            start = starts[prefix]
            if prefix in logits:
                if count > 1:
                    self._cache.copy(start, slice(start + 1, start + count), len(prefix))
            else:
                stored, logits[prefix], known = self._prefixes[prefix]
                if known is not None:
                    routes[prefix] = known
                self._cache.insert(stored, slice(start, start + count))
            for slot in range(start, start + count):
                if prefix not in fresh or slot > start:
                    taken[slot - first].cached_tokens = len(prefix)
                if prefix in routes:  # of tokens from before a retraction the first record stays
                    taken[slot - first].add_routes(routes[prefix][taken[slot - first].num_routed :])
        self._store_prefixes(fresh, starts, logits, routes)
        return torch.stack([logits[request.prefix] for request in taken])

    def _store_prefixes(
        self,
        fresh: list[tuple[int, ...]],
        starts: dict[tuple[int, ...], int],
        logits: dict[tuple[int, ...], Tensor],
        routes: dict[tuple[int, ...], Routes],
    ) -> None:
        """Keep the cache of prompts that other requests still wait with."""
        for prefix in fresh:
            if prefix in self._wanted:
                cached = self._cache.export(starts[prefix], len(prefix))
                self._prefixes[prefix] = (cached, logits[prefix].clone(), routes.get(prefix))
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        for prefix in [prefix for prefix in self._prefixes if prefix not in self._wanted]:
            del self._prefixes[prefix]

    def _reserve(self, slots: int, length: int) -> None:
        """Give the cache `length` positions exactly, since attention is fastest over a contiguous cache, and slots.

        Growing by one bucket copies the cache once in 32 steps; a cache that became too long shrinks after as many.
        """
        have_slots, have_length = self._cache.num_slots, self._cache.length
        self._steps_since_resize += 1
        too_long = length < have_length and self._steps_since_resize > LENGTH_BUCKET
        if slots <= have_slots and length <= have_length and not too_long:
            return
        roomy = have_slots if slots <= have_slots else padded_rows(min(self.num_slots, max(slots, 2 * have_slots)))
        slots = roomy if roomy * length <= self.kv_tokens else slots
        self._cache.resize(slots, length)
        self._steps_since_resize = 0

    def _occupy(self, slot: int, request: Request) -> None:
        """Set a slot's bookkeeping for a request whose prefix is in the cache."""
        have = len(request.tokens)
        self._positions[slot] = len(request.prompt) + have - 1  # of the last token in the cache
        self._done[slot], self._reported[slot], self._before[slot] = 0, 0, have
        self._limits[slot] = request.limit - have
        self._minimums[slot] = request.params.min_new_tokens - have
        if len(request.stop_ids) > self._stop_ids.shape[1]:
            wider = np.full((len(self._stop_ids), len(request.stop_ids)), -1, np.int64)
            wider[:, : self._stop_ids.shape[1]] = self._stop_ids
            self._stop_ids = wider
        self._has_stop_strings[slot] = bool(request.params.stop)
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        self._uniforms[slot] = uniforms(request.key, have // UNIFORM_CHUNK)
        if self._limits[slot] > self._journal_tokens.shape[1]:
            self._widen_journal(int(self._limits[slot]))

    def _widen_journal(self, length: int) -> None:
        length = max(length, 2 * self._journal_tokens.shape[1])
        extra = ((0, 0), (0, length - self._journal_tokens.shape[1]))
        self._journal_tokens = np.pad(self._journal_tokens, extra)
        self._journal_log_probs = np.pad(self._journal_log_probs, extra)
        self._journal_routes = np.pad(self._journal_routes, (*extra, (0, 0), (0, 0)))

    # -- decoding ----------------------------------------------------------------------------------------------

    def _decode_step(self) -> None:
        """One token for every running request."""
        self._fit_budget()
        n = len(self.running)
        padded = padded_rows(n)
        self._positions[:n] += 1
        length = bucketed_length(int(self._positions[:n].max()) + 1)
        self._reserve(padded, length)
        logits = self.model.decode(self._tokens[:padded], self._positions[:padded], self._cache, length)[:n]
        if self.model.records_routes:
            self._journal_routes[self._row_numbers[:n], self._routed[:n]] = self.model.routes[0][:n]
            self._routed[:n] += 1
        if self._rows is None:
            params = [request.params for request in self.running]
            self._rows = SamplingRows.build(params, self.model.vocab_size, self.model.device)
        self._draw(logits, self._rows, 0)

    def _fit_budget(self) -> None:
        """Retract requests until one more position for each fits the cache budget."""
        while (n := len(self.running)) > 1:
            if padded_rows(n) * bucketed_length(int(self._positions[:n].max()) + 2) <= self.kv_tokens:
                return
            self.retract(1)

    def _draw(self, logits: Tensor, rows: SamplingRows, first: int) -> None:
        """Sample a token for slots `first` onwards, write it down, and take out finished requests."""
        n = logits.shape[0]
        slots = slice(first, first + n)
        done = self._done[slots]
        self._ban_stops(logits, first, done)
        index = self._before[slots] + done
        column = index % UNIFORM_CHUNK
        for i in np.flatnonzero((column == 0) & (index > 0)):
            self._uniforms[first + i] = uniforms(self.running[first + i].key, int(index[i]) // UNIFORM_CHUNK)
        rows_n = self._row_numbers[slots]
        uniform_N = torch.from_numpy(self._uniforms[rows_n, column]).to(self.model.device)
        tokens_N, log_probs_N = self._sampler.sample(logits, rows, uniform_N)
        self._tokens[slots] = tokens_N
        tokens, log_probs = tokens_N.cpu().numpy(), log_probs_N.cpu().numpy()
        if not np.isfinite(log_probs).all():
            bad = self.running[first + int(np.flatnonzero(~np.isfinite(log_probs))[0])]
            raise EngineError(
                f"the logits of request {bad.rid} are not finite at response token {int(index.max())}, with weights of "
                f"version {self.version}; the weights hold NaN or infinity: check the last training step"
            )
        self._journal_tokens[rows_n, done], self._journal_log_probs[rows_n, done] = tokens, log_probs
        done += 1  # in place: a view of the bookkeeping
        self.tokens_generated += n
        self._take_out(first, tokens, done)

    def _ban_stops(self, logits: Tensor, first: int, done: NDArray[np.int64]) -> None:
        """Give stop tokens no probability where `min_new_tokens` is not reached."""
        for i in np.flatnonzero(done < self._minimums[first : first + len(done)]):
            stops = [t for t in self.running[first + i].stop_ids if t < self.model.vocab_size]
            logits[int(i), stops] = float("-inf")

    def _take_out(self, first: int, tokens: NDArray[np.int64], done: NDArray[np.int64]) -> None:
        """Finish the requests that `tokens`, one for each slot from `first` on, end."""
        slots = slice(first, first + len(tokens))
        may_stop = done >= self._minimums[slots]
        stopped = (tokens[:, None] == self._stop_ids[slots]).any(1) & may_stop
        full = done >= self._limits[slots]
        ended: dict[int, tuple[Literal["stop", "length"], Any]] = {}
        for i in np.flatnonzero(stopped | full):
            ended[first + int(i)] = ("stop", int(tokens[i])) if stopped[i] else ("length", None)
        for i in np.flatnonzero(self._has_stop_strings[slots] & may_stop & ~stopped):
            slot = first + int(i)
            request = self.running[slot]
            journal = self._journal_tokens[slot, : done[i]]
            if matched := self._stop_strings.match(request.params, request.tokens, journal):
                ended[slot] = ("stop", matched)
        for slot in sorted(ended, reverse=True):
            reason, matched = ended[slot]
            self._leave(slot, reason, matched)

    # -- leaving -----------------------------------------------------------------------------------------------

    def _flush(self, slot: int) -> None:
        """Move the journal of a slot into its request."""
        request, n = self.running[slot], int(self._done[slot])
        self._report_slot(slot)
        request.tokens += self._journal_tokens[slot, :n].tolist()
        request.log_probs += self._journal_log_probs[slot, :n].tolist()
        request.versions += [self.version] * n
        if self.model.records_routes:
            request.add_routes(self._journal_routes[slot, : self._routed[slot]].copy())
            self._routed[slot] = 0
        self._before[slot] += n
        self._limits[slot] -= n
        self._minimums[slot] -= n
        self._done[slot] = self._reported[slot] = 0

    def _leave(self, slot: int, reason: Literal["stop", "length", "abort"], matched: int | str | None = None) -> None:
        """Finish the request in `slot`; the last slot moves into its place."""
        self._flush(slot)
        request, last = self.running[slot], len(self.running) - 1
        if slot != last:
            self._cache.copy(last, slice(slot, slot + 1), int(self._positions[last]) + 1)
            self._tokens[slot] = self._tokens[last]
            done = int(self._done[last])
            for array in (
                self._positions,
                self._done,
                self._before,
                self._limits,
                self._minimums,
                self._reported,
                self._routed,
            ):
                array[slot] = array[last]
            for array in (self._stop_ids, self._uniforms, self._has_stop_strings):
                array[slot] = array[last]
            for journal in (self._journal_tokens, self._journal_log_probs):
                journal[slot, :done] = journal[last, :done]
            self._journal_routes[slot, : self._routed[last]] = self._journal_routes[last, : self._routed[last]]
            self.running[slot] = self.running[last]
        self.running.pop()
        self._clear(last)
        self._rows = None
        self._finish(request, reason, matched)

    def _clear(self, slot: int) -> None:
        """Make a free slot harmless as padding: it decodes token 0 at position 0."""
        self._routed[slot] = 0
        self._positions[slot] = 0
        self._tokens[slot] = 0

    def _finish(
        self, request: Request, reason: Literal["stop", "length", "abort"], matched: int | str | None = None
    ) -> None:
        result: Finished = request.finish(reason, self.tokenizer, matched)
        request.deliver(result)

    def _report(self) -> None:
        for slot, request in enumerate(self.running):
            if request.report is not None:
                self._report_slot(slot)

    def _report_slot(self, slot: int) -> None:
        request, since, until = self.running[slot], int(self._reported[slot]), int(self._done[slot])
        if request.report is None or since == until:
            return
        tokens = self._journal_tokens[slot, since:until].tolist()
        request.report(Progress(tokens, self._journal_log_probs[slot, since:until].tolist(), self.version))
        self._reported[slot] = until
