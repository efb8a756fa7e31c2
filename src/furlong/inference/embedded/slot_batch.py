"""The slots of the engine: admit requests, decode them together, take out what has finished.

Runs on the engine's thread only. Active slots are 0..n-1: when one finishes, the last one moves into its place.
Axes: N active slots, V vocabulary, R response tokens.

A request in a slot has its new tokens in the journal until it leaves the slot.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.catalogue import Diagnosis
from furlong.core.routing import Routes
from furlong.errors import EngineError
from furlong.inference.embedded.decode_model import LENGTH_BUCKET, DecodeModel, bucketed_length, padded_rows
from furlong.inference.embedded.request import Finished, Progress, Request, StopStrings, TextTokenizer
from furlong.inference.embedded.sampler import Sampler, SamplingRows
from furlong.inference.embedded.slot_cache import SlotCache
from furlong.inference.embedded.token_journal import Journal

KvPolicy = Literal["recompute", "keep"]
StoredPrefix = tuple[list[tuple[Tensor, Tensor]], Tensor, Routes | None]  # keys and values, logits


@dataclass(frozen=True)
class _Lineup:
    """What holds for the steps while the same `n` requests are in the slots.

    `tokens` and `positions` are those of the slots that are computed, `active` positions those of the requests.
    `first_end` is when the first of them reaches its limit, `stops_from` when all of them may stop.
    """

    n: int
    rows: SamplingRows
    tokens: Tensor
    positions: NDArray[np.int64]
    active: NDArray[np.int64]
    stop_ids: NDArray[np.int64]
    stops_from: int
    first_end: int
    has_stop_strings: bool
    reports: bool


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
        self._lineup: _Lineup | None = None
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=self.model.device)
        self._positions = np.zeros(slots, np.int64)  # of the last token in the cache
        self._longest = 0  # the largest of them, in a lineup
        self._journal = Journal(slots, self.model.routing if self.model.records_routes else None)

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
            self._put_back(request)
            self._clear(slot)
        self._lineup = None

    def _put_back(self, request: Request) -> None:
        self.waiting.appendleft(request)
        self._wanted[request.prefix] += 1

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
            if (self._lineup is not None and self._lineup.reports) or interrupted():
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
            try:
                logits = self._fill_slots(taken, first)
            except BaseException:
                for request in reversed(taken):  # or nobody would end them
                    self._put_back(request)
                raise
            self.running += taken
            for slot, request in enumerate(taken, first):
                self._occupy(slot, request)
            self._lineup = None
            rows = SamplingRows.build([r.params for r in taken], self.model.vocab_size, self.model.device)
            row = self._journal.clock - 1
            self._ban_stops(logits, first, row)
            self._take_out(first, self._draw(logits, rows, first, row))

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
        self._positions[slot] = len(request.prompt) + len(request.tokens) - 1
        self._journal.open(slot, request)

    # -- decoding ----------------------------------------------------------------------------------------------

    def _decode_step(self) -> None:
        """One token for every running request."""
        if self._journal.is_full:
            self._start_journal_over()
        lineup = self._fitting_lineup()
        np.add(lineup.active, 1, out=lineup.active)
        self._longest += 1
        length = bucketed_length(self._longest + 1)
        self._reserve(len(lineup.positions), length)
        logits = self.model.decode(lineup.tokens, lineup.positions, self._cache, length)[: lineup.n]
        journal, row = self._journal, self._journal.clock
        if self.model.records_routes:
            journal.routes[row, : lineup.n] = self.model.routes[0][: lineup.n]
        if row < lineup.stops_from:
            self._ban_stops(logits, 0, row)
        tokens = self._draw(logits, lineup.rows, 0, row)
        journal.clock += 1
        if journal.clock >= lineup.first_end or lineup.has_stop_strings or (lineup.stop_ids == tokens).any():
            self._take_out(0, tokens)

    def _start_journal_over(self) -> None:
        for slot in range(len(self.running)):
            self._flush(slot)
        self._journal.start_over(self.running)
        self._lineup = None

    def _fitting_lineup(self) -> _Lineup:
        """The requests that run, after those are put back for which there is no further position in the budget."""
        while (lineup := self._lineup or self._line_up()).n > 1:
            if len(lineup.positions) * bucketed_length(self._longest + 2) <= self.kv_tokens:
                break
            self.retract(1)
        return lineup

    def _line_up(self) -> _Lineup:
        n = len(self.running)
        padded, journal = padded_rows(n), self._journal
        self._longest = int(self._positions[:n].max())
        self._lineup = _Lineup(
            n=n,
            rows=SamplingRows.build([r.params for r in self.running], self.model.vocab_size, self.model.device),
            tokens=self._tokens[:padded],
            positions=self._positions[:padded],
            active=self._positions[:n],
            stop_ids=journal.stop_ids[:, :n],
            stops_from=int(journal.may_stop[:n].max()),
            first_end=int(journal.ends[:n].min()),
            has_stop_strings=bool(journal.has_stop_strings[:n].any()),
            reports=any(request.report is not None for request in self.running),
        )
        return self._lineup

    def _draw(self, logits: Tensor, rows: SamplingRows, first: int, row: int) -> NDArray[np.int64]:
        """Sample a token for slots `first` onwards and write it down in `row`; returns the tokens."""
        n, journal = logits.shape[0], self._journal
        slots = slice(first, first + n)
        uniform_N = journal.uniforms(row, slots).to(self.model.device)
        tokens_N, log_probs_N = self._sampler.sample(logits, rows, uniform_N)
        self._tokens[slots].copy_(tokens_N)
        tokens, log_probs = tokens_N.cpu().numpy(), log_probs_N.cpu().numpy()
        if not math.isfinite(log_probs.sum()):
            slot = first + int(np.flatnonzero(~np.isfinite(log_probs))[0])
            where = f"request {self.running[slot].rid} are not finite at response token {journal.num_tokens(slot, row)}"
            raise EngineError(_not_finite(where, self.version).text())
        journal.tokens[row, slots] = tokens
        journal.log_probs[row, slots] = log_probs
        self.tokens_generated += n
        return tokens

    def _ban_stops(self, logits: Tensor, first: int, row: int) -> None:
        """Give stop tokens no probability where `min_new_tokens` is not reached."""
        for i in np.flatnonzero(row < self._journal.may_stop[first : first + len(logits)]):
            stops = [t for t in self.running[first + i].stop_ids if t < self.model.vocab_size]
            logits[int(i), stops] = float("-inf")

    def _take_out(self, first: int, tokens: NDArray[np.int64]) -> None:
        """Finish the requests that `tokens`, one for each slot from `first` on, end."""
        slots, journal = slice(first, first + len(tokens)), self._journal
        may_stop = journal.clock >= journal.may_stop[slots]
        stopped = (tokens == journal.stop_ids[:, slots]).any(0) & may_stop
        full = journal.clock >= journal.ends[slots]
        ended: dict[int, tuple[Literal["stop", "length"], Any]] = {}
        for i in np.flatnonzero(stopped | full):
            ended[first + int(i)] = ("stop", int(tokens[i])) if stopped[i] else ("length", None)
        for i in np.flatnonzero(journal.has_stop_strings[slots] & may_stop & ~stopped):
            slot = first + int(i)
            request = self.running[slot]
            if matched := self._stop_strings.match(request.params, request.tokens, journal.response(slot)):
                ended[slot] = ("stop", matched)
        for slot in sorted(ended, reverse=True):
            reason, matched = ended[slot]
            self._leave(slot, reason, matched)

    # -- leaving -----------------------------------------------------------------------------------------------

    def _flush(self, slot: int) -> None:
        """Move the journal of a slot into its request."""
        self._report_slot(slot)
        request = self.running[slot]
        tokens, log_probs, routes = self._journal.take(slot)
        request.tokens += tokens
        request.log_probs += log_probs
        request.versions += [self.version] * len(tokens)
        if self.model.records_routes:
            request.add_routes(routes)

    def _leave(self, slot: int, reason: Literal["stop", "length", "abort"], matched: int | str | None = None) -> None:
        """Finish the request in `slot`; the last slot moves into its place."""
        self._flush(slot)
        request, last = self.running[slot], len(self.running) - 1
        if slot != last:
            self._cache.copy(last, slice(slot, slot + 1), int(self._positions[last]) + 1)
            self._tokens[slot] = self._tokens[last]
            self._positions[slot] = self._positions[last]
            self._journal.move(last, slot)
            self.running[slot] = self.running[last]
        self.running.pop()
        self._clear(last)
        self._lineup = None
        self._finish(request, reason, matched)

    def _clear(self, slot: int) -> None:
        """Make a free slot harmless as padding: it decodes token 0 at position 0."""
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
        report = self.running[slot].report
        if report is None:
            return
        tokens, log_probs = self._journal.unreported(slot)
        if tokens:
            report(Progress(tokens, log_probs, self.version))


def _not_finite(where: str, version: int) -> Diagnosis:
    """NUM04 of an engine: of the weights that a run begins with, or of those that a training step has made."""
    finding = f"the logits of {where}, with weights of version {version}"
    if version == 0:
        cause = "The model's own weights hold NaN or infinity, or overflow in this precision."
        return Diagnosis("NUM04", finding, cause, "`furlong check DIR` reads the values in its files; try --fp32")
    cause = "The last training step left NaN or infinity in the weights."
    return Diagnosis(
        "NUM04",
        finding,
        cause,
        "lower --lr or --clip-grad, compute in --fp32; go on from a checkpoint before that step",
    )
