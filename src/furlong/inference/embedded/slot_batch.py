"""Continuous batching: admit requests into slots, decode them together, finish them.

Runs on the engine thread only. Active slots are 0..n-1; when one finishes, the last one moves into its place. New
tokens of a request stay in the `TokenBuffer` until it leaves its slot.
Axes: N active slots, V vocabulary, R response tokens.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.routing import Routes
from furlong.core.token_stream import TextTokenizer
from furlong.errors import EngineError
from furlong.inference.embedded.decode_model import LENGTH_BUCKET, DecodeModel, bucketed_length, padded_rows
from furlong.inference.embedded.decode_steps import SlotCache, SlotContent, step_rows
from furlong.inference.embedded.request import Progress, Request, StopStrings, TokenBuffer, TokenIds
from furlong.inference.embedded.sampler import Banned, Sampler, SamplingPlan, SamplingRows, nonfinite_logits

GROWTH = 1.5  # of the memory of a prompt that no longer fits
MAX_BRANCHES = 8  # prompts of one session, such as those of its roles

KvPolicy = Literal["recompute", "keep"]
StoredPrefix = tuple[SlotContent, Tensor, Routes | None]  # with the logits after it


@dataclass(eq=False)
class StoredPrompt:
    """Keys and values of a prompt by layer, each [K, capacity, D], and its routed experts if they are recorded."""

    key: str
    tokens: NDArray[np.int64]
    layers: list[tuple[Tensor, Tensor]]
    routes: Routes | None

    @property
    def capacity(self) -> int:
        """Positions for which memory is allocated."""
        return self.layers[0][0].shape[1] if self.layers else 0

    def shared_with(self, tokens: NDArray[np.int64]) -> int:
        """Length of the longest common prefix."""
        count = min(len(self.tokens), len(tokens))
        differs = np.flatnonzero(self.tokens[:count] != tokens[:count])
        return int(differs[0]) if len(differs) else count


class PrefixCache:
    """Prompts by the key of their session, at most `max_tokens` positions; the least recently used are dropped first.

    A prompt that continues a stored one replaces it, others are branches. Only what prefills computed is stored. The
    next prompt of a session computes the sampled tokens again, together with those that follow, because the sums of
    decode steps differ in the last bits.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0  # positions of allocated memory
        self._prompts: OrderedDict[int, StoredPrompt] = OrderedDict()  # by id, the least recently used first
        self._by_key: dict[str, list[StoredPrompt]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def clear(self) -> None:
        """Drop everything."""
        self._prompts.clear()
        self._by_key.clear()
        self.num_tokens = 0

    def match(self, key: str, prompt: Sequence[int]) -> int:
        """Length of the longest prefix of `prompt` that `key` stores; less than the whole prompt."""
        _, length = self._longest(key, _array(prompt))
        return min(length, len(prompt) - 1)

    def _longest(self, key: str, tokens: NDArray[np.int64]) -> tuple[StoredPrompt | None, int]:
        best: StoredPrompt | None = None
        length = 0
        for stored in self._by_key.get(key, ()):
            if (shared := stored.shared_with(tokens)) > length:
                best, length = stored, shared
        if best is not None:
            self._prompts.move_to_end(id(best))
        return best, length

    def insert(self, key: str, prompt: Sequence[int], length: int, cache: SlotCache, slot: int) -> Routes | None:
        """Write the first `length` positions of a matched prompt into a slot; return their routed experts."""
        stored, _ = self._longest(key, _array(prompt)[:length])
        assert stored is not None
        for index, (keys, values) in enumerate(stored.layers):
            slot_keys, slot_values = cache.layer(index, keys[None], values[None])
            slot_keys[slot, :, :length] = keys[:, :length]
            slot_values[slot, :, :length] = values[:, :length]
        return None if stored.routes is None else stored.routes[:length]

    def store(self, key: str, prompt: Sequence[int], cache: SlotCache, slot: int, routes: Routes | None) -> None:
        """Store the prompt in `slot` under `key`, copying only what follows the stored prompt that it continues."""
        length, tokens = len(prompt), _array(prompt)
        known, shared = self._longest(key, tokens)
        if known is not None and shared == length:
            return
        layers: list[tuple[Tensor, Tensor]] = []
        if known is not None and shared == len(known.tokens):
            self._drop(known)
            layers = known.layers
        else:
            shared = 0
        if length > self.max_tokens:
            return
        capacity = layers[0][0].shape[1] if layers else 0
        if capacity < length:
            capacity = min(max(length, int(GROWTH * capacity)), self.max_tokens)
            layers = [
                (_longer(old, shared, like, capacity), _longer(old_values, shared, like_values, capacity))
                for (old, old_values), (like, like_values) in zip(
                    layers or [(None, None)] * len(cache.layers), cache.layers, strict=True
                )
            ]
        for (keys, values), (slot_keys, slot_values) in zip(layers, cache.layers, strict=True):
            keys[:, shared:length] = slot_keys[slot, :, shared:length]
            values[:, shared:length] = slot_values[slot, :, shared:length]
        self._add(StoredPrompt(key, tokens, layers, routes))

    def _add(self, stored: StoredPrompt) -> None:
        branches = self._by_key.setdefault(stored.key, [])
        if len(branches) == MAX_BRANCHES:
            self._drop(next(each for each in self._prompts.values() if each.key == stored.key))
            branches = self._by_key.setdefault(stored.key, [])
        branches.append(stored)
        self._prompts[id(stored)] = stored
        self.num_tokens += stored.capacity
        while self.num_tokens > self.max_tokens:
            self._drop(next(iter(self._prompts.values())))

    def _drop(self, stored: StoredPrompt) -> None:
        del self._prompts[id(stored)]
        self.num_tokens -= stored.capacity
        branches = self._by_key[stored.key]
        branches.remove(stored)
        if not branches:
            del self._by_key[stored.key]


def _array(ids: Sequence[int]) -> NDArray[np.int64]:
    return ids.array if isinstance(ids, TokenIds) else np.asarray(ids, np.int64)


def _longer(old: Tensor | None, known: int, like: Tensor, capacity: int) -> Tensor:
    """Memory [K, capacity, D] for a layer of the cache [S, K, L, D], with the `known` first positions of `old`."""
    new = like.new_empty(like.shape[1], capacity, like.shape[3])
    if old is not None:
        new[:, :known] = old[:, :known]
    return new


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


class SlotBatch:
    """Continuous batching over a slot cache.

    At most `num_slots` requests decode together, fewer if their cached positions would exceed `kv_tokens`; the newest
    ones are then retracted and recomputed later. A prompt is prefilled once for all queued requests that have it.
    """

    def __init__(
        self,
        model: DecodeModel,
        *,
        num_slots: int,
        kv_tokens: int,
        prefill_tokens: int,
        tokenizer: TextTokenizer | None,
        prefix_tokens: int = 0,
    ) -> None:
        self.model = model
        self.kept_prompts = PrefixCache(prefix_tokens if model.extends_prefixes else 0)
        self.num_slots, self.kv_tokens, self.prefill_tokens = num_slots, kv_tokens, prefill_tokens
        self.tokenizer = tokenizer
        self.version = 0
        self.waiting: deque[Request] = deque()
        self._prefix_counts: Counter[TokenIds] = Counter()  # of waiting requests
        self.running: list[Request] = []
        self.tokens_generated = 0
        self.prefilled_tokens = 0
        self._sampler = Sampler(model.vocab_size)
        self._stop_strings = StopStrings(tokenizer)
        self._allocate()

    def forget_prefixes(self) -> None:
        """Drop the KV cache of queued prompts and of earlier ones."""
        self.prefixes.clear()
        self.kept_prompts.clear()

    def _padded(self, n: int) -> int:
        return step_rows(n) if self.model.captures_steps else padded_rows(n)

    def _allocate(self) -> None:
        slots = self._padded(self.num_slots)
        self._cache = SlotCache()
        self._steps_since_resize = 0
        self._final_length = 0  # of all admitted requests at their limits
        self.prefixes: dict[TokenIds, StoredPrefix] = {}
        self.kept_prompts.clear()
        self._plan: SamplingPlan | None = None
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=self.model.device)
        self._positions = np.zeros(slots, np.int64)  # of the last token in the cache
        self._longest = 0  # the largest of them under the current plan
        self._buffer = TokenBuffer(slots, self.model.routing if self.model.records_routes else None)

    @property
    def cached_tokens(self) -> int:
        """Cached positions of running requests."""
        return int(self._positions[: len(self.running)].sum()) + len(self.running)

    def stats(self, *, waiting: int, busy_s: float) -> EngineStats:
        """Return a snapshot of the counters; callable from any thread."""
        return EngineStats(
            running=len(self.running),
            waiting=waiting,
            version=self.version,
            cached_tokens=self.cached_tokens,
            tokens_generated=self.tokens_generated,
            prefilled_tokens=self.prefilled_tokens,
            busy_s=busy_s,
        )

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        for request in requests:
            self.waiting.append(request)
            self._prefix_counts[request.prefix] += 1

    def drop_cache(self) -> int:
        """Release the memory of the cache while no request runs; returns the number of bytes."""
        assert not self.running
        freed = self._cache.num_bytes()
        self._drop_unused_prefixes()
        self.kept_prompts.clear()
        self._cache = SlotCache()
        return freed

    def reset(self) -> list[Request]:
        """Drop all requests and the cache; returns the requests."""
        dropped = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        self._prefix_counts.clear()
        self._allocate()
        return dropped

    def abort(self, is_selected: Callable[[Request], bool]) -> int:
        """Finish the selected requests with the tokens they have; returns how many."""
        removed = [request for request in self.waiting if is_selected(request)]
        self.waiting = deque(request for request in self.waiting if not is_selected(request))
        self._prefix_counts = Counter(request.prefix for request in self.waiting)
        for request in removed:
            request.deliver(request.finish("abort", self.tokenizer))
        slots = [slot for slot, request in enumerate(self.running) if is_selected(request)]
        for slot in reversed(slots):
            self._leave(slot, "abort")
        self._drop_unused_prefixes()
        return len(removed) + len(slots)

    def new_weights(self, version: int, policy: KvPolicy) -> None:
        """Set the version of the weights.

        "recompute" retracts running requests, so that their cache is recomputed, and drops the kept prompts; "keep"
        continues with the cache of the old weights.
        """
        if policy == "recompute":
            self.retract(len(self.running))
            self.kept_prompts.clear()
        else:
            for slot in range(len(self.running)):
                self._flush(slot)
        self.prefixes.clear()
        self.version = version

    def retract(self, count: int) -> None:
        """Move the `count` newest running requests to the head of the queue, with their tokens."""
        for slot in range(len(self.running) - 1, len(self.running) - 1 - count, -1):
            self._flush(slot)
            request = self.running.pop()
            request.num_retractions += 1
            self._requeue(request)
            self._clear(slot)
        self._plan = None

    def _requeue(self, request: Request) -> None:
        self.waiting.appendleft(request)
        self._prefix_counts[request.prefix] += 1

    def run(self, *, admit: bool, interrupted: Callable[[], bool]) -> None:
        """Admit requests, then decode until one finishes, one reports its tokens, or `interrupted`."""
        if admit:
            self.admit()
        before = len(self.running)
        while self.running and len(self.running) == before:
            self._decode_step()
            if (self._plan is not None and self._plan.reports) or interrupted():
                break
        for slot in range(len(self.running)):
            self._report_slot(slot)

    # -- admission ---------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Move waiting requests into free slots and sample their first token."""
        while self.waiting and len(self.running) < self.num_slots:
            taken = self._take_waiting()
            if not taken:
                return
            first = len(self.running)
            try:
                logits = self._fill_slots(taken, first)
            except BaseException:
                for request in reversed(taken):  # so that `reset` returns them
                    self._requeue(request)
                raise
            self.running += taken
            for slot, request in enumerate(taken, first):
                self._positions[slot] = len(request.prompt) + len(request.tokens) - 1
                self._buffer.open(slot, request)
            self._plan = None
            rows = SamplingRows.build([r.params for r in taken], self.model.vocab_size, self.model.device)
            row = self._buffer.clock - 1
            banned = self._banned(len(taken), first, row)
            self._finish_ended(first, self._sample(logits, rows, first, row, banned))

    def _take_waiting(self) -> list[Request]:
        taken: list[Request] = []
        longest = int(self._positions[: len(self.running)].max(initial=0)) + 1
        prefill, seen = 0, set[TokenIds]()
        while self.waiting and len(self.running) + len(taken) < self.num_slots:
            request = self.waiting[0]
            prefix = request.prefix
            cost = 0 if prefix in seen or prefix in self.prefixes else len(prefix) - self._known(request)
            occupied = len(self.running) + len(taken)
            longest = max(longest, len(prefix) + 1)
            if occupied and self._padded(occupied + 1) * bucketed_length(longest + 1) > self.kv_tokens:
                break
            if taken and prefill + cost > self.prefill_tokens:
                break
            seen.add(prefix)
            prefill += cost
            taken.append(self.waiting.popleft())
            self._prefix_counts[prefix] -= 1
            if not self._prefix_counts[prefix]:
                del self._prefix_counts[prefix]
        # Adjacent requests with one prefix are filled by a single copy.
        order = {prefix: i for i, prefix in enumerate(dict.fromkeys(r.prefix for r in taken))}
        return sorted(taken, key=lambda r: order[r.prefix])

    def _known(self, request: Request) -> int:
        key = request.params.prefix_key
        return 0 if key is None else self.kept_prompts.match(key, request.prefix)

    def _fill_slots(self, taken: list[Request], first: int) -> Tensor:
        """Prefill each distinct prefix once and copy it to its other slots; returns the requests' logits [N, V]."""
        counts = Counter(request.prefix for request in taken)
        starts: dict[TokenIds, int] = {}
        for slot, request in enumerate(taken, first):
            starts.setdefault(request.prefix, slot)
        longest = max(max(map(len, counts)), int(self._positions[:first].max(initial=0)) + 1)
        ends = (len(request.prompt) + request.limit for request in (*self.running, *taken))
        self._final_length = bucketed_length(max(ends) + 1)
        self._reserve(self._padded(first + len(taken)), bucketed_length(longest + 1))
        fresh = [prefix for prefix in counts if prefix not in self.prefixes]
        logits: dict[TokenIds, Tensor] = {}
        routes: dict[TokenIds, Routes] = {}
        known: dict[TokenIds, int] = {}
        if fresh:
            logits, routes, known = self._prefill(fresh, starts, taken, first)
        for prefix, count in counts.items():
            start = starts[prefix]
            if prefix in logits:
                if count > 1:
                    self._cache.copy(start, slice(start + 1, start + count), len(prefix))
            else:
                stored, logits[prefix], experts = self.prefixes[prefix]
                if experts is not None:
                    routes[prefix] = experts
                self._cache.insert(stored, slice(start, start + count))
            for slot in range(start, start + count):
                if not taken[slot - first].num_retractions:  # of the prompt, before tokens were added
                    is_computed = prefix in known and slot == start
                    taken[slot - first].cached_tokens = known[prefix] if is_computed else len(prefix)
                if prefix in routes:  # after a retraction, keep the earlier routes
                    taken[slot - first].add_routes(routes[prefix][taken[slot - first].num_routed :])
        self._store_prefixes(fresh, starts, logits, routes)
        if self.kept_prompts.max_tokens:
            for slot, request in enumerate(taken, first):
                if (key := request.params.prefix_key) is not None:
                    self.kept_prompts.store(key, request.prefix, self._cache, slot, routes.get(request.prefix))
        return torch.stack([logits[request.prefix] for request in taken])

    def _prefill(
        self, fresh: list[TokenIds], slots: Mapping[TokenIds, int], taken: list[Request], first: int
    ) -> tuple[dict[TokenIds, Tensor], dict[TokenIds, Routes], dict[TokenIds, int]]:
        """Compute what the sessions of these prefixes have not cached; returns logits, routes and cached lengths."""
        known: dict[TokenIds, int] = {}
        begun: dict[TokenIds, Routes] = {}
        for prefix in fresh:
            request = taken[slots[prefix] - first]
            known[prefix] = length = self._known(request)
            if (key := request.params.prefix_key) is not None and length:
                experts = self.kept_prompts.insert(key, prefix, length, self._cache, slots[prefix])
                if experts is not None:
                    begun[prefix] = experts
        rows = self.model.prefill(fresh, self._cache, [slots[prefix] for prefix in fresh], list(known.values()))
        routes: dict[TokenIds, Routes] = {}
        if self.model.records_routes:
            routes = dict(zip(fresh, self.model.routes, strict=True))
            routes |= {prefix: np.concatenate([begun[prefix], routes[prefix]]) for prefix in begun}
        self.prefilled_tokens += sum(len(prefix) - known[prefix] for prefix in fresh)
        return dict(zip(fresh, rows, strict=True)), routes, known

    def _store_prefixes(
        self,
        fresh: list[TokenIds],
        starts: dict[TokenIds, int],
        logits: dict[TokenIds, Tensor],
        routes: dict[TokenIds, Routes],
    ) -> None:
        for prefix in fresh:
            if prefix in self._prefix_counts:
                cached = self._cache.export(starts[prefix], len(prefix))
                self.prefixes[prefix] = (cached, logits[prefix].clone(), routes.get(prefix))
        self._drop_unused_prefixes()

    def _drop_unused_prefixes(self) -> None:
        for prefix in [prefix for prefix in self.prefixes if prefix not in self._prefix_counts]:
            del self.prefixes[prefix]

    def _reserve(self, slots: int, length: int) -> None:
        """Resize the cache to exactly `length` positions (attention is fastest on a contiguous cache) and `slots`.

        Growing by one bucket copies the cache every 32 steps; a cache that is too long shrinks after as many.
        """
        have_slots, have_length = self._cache.num_slots, self._cache.length
        self._steps_since_resize += 1
        if self.model.captures_steps:
            self._cache.grow(slots, length, self._final_length, self.kv_tokens)
            return
        too_long = length < have_length and self._steps_since_resize > LENGTH_BUCKET
        if slots <= have_slots and length <= have_length and not too_long:
            return
        roomy = have_slots if slots <= have_slots else self._padded(min(self.num_slots, max(slots, 2 * have_slots)))
        slots = roomy if roomy * length <= self.kv_tokens else slots
        self._cache.resize(slots, length)
        self._steps_since_resize = 0

    # -- decoding ----------------------------------------------------------------------------------------------

    def _decode_step(self) -> None:
        if self._buffer.is_full:
            for slot in range(len(self.running)):
                self._flush(slot)
            self._buffer.rewind(self.running)
            self._plan = None
        plan = self._fitting_plan()
        np.add(plan.active, 1, out=plan.active)
        self._longest += 1
        length = bucketed_length(self._longest + 1)
        self._reserve(len(plan.positions), length)
        logits = self.model.decode(plan.tokens, plan.positions, self._cache, length)[: plan.n]
        buffer, row = self._buffer, self._buffer.clock
        if self.model.records_routes:
            buffer.routes[row, : plan.n] = self.model.routes[0][: plan.n]
        banned = self._banned(plan.n, 0, row) if row < plan.stops_from or plan.has_grammars else {}
        tokens = self._sample(logits, plan.rows, 0, row, banned)
        buffer.clock += 1
        if buffer.clock >= plan.first_end or plan.has_stop_strings or (plan.stop_ids == tokens).any():
            self._finish_ended(0, tokens)

    def _fitting_plan(self) -> SamplingPlan:
        """The plan after retracting the requests for which the cache budget has no further position."""
        while (plan := self._plan or self._make_plan()).n > 1:
            if len(plan.positions) * bucketed_length(self._longest + 2) <= self.kv_tokens:
                break
            self.retract(1)
        return plan

    def _make_plan(self) -> SamplingPlan:
        n = len(self.running)
        padded, buffer = self._padded(n), self._buffer
        self._longest = int(self._positions[:n].max())
        self._plan = SamplingPlan(
            n=n,
            rows=SamplingRows.build([r.params for r in self.running], self.model.vocab_size, self.model.device),
            tokens=self._tokens[:padded],
            positions=self._positions[:padded],
            active=self._positions[:n],
            stop_ids=buffer.stop_ids[: max((len(r.stop_ids) for r in self.running), default=0), :n],
            stops_from=int(buffer.may_stop[:n].max()),
            first_end=int(buffer.ends[:n].min()),
            has_stop_strings=bool(buffer.has_stop_strings[:n].any()),
            reports=any(request.report is not None for request in self.running),
            has_grammars=any(request.grammar is not None for request in self.running),
        )
        return self._plan

    def _sample(self, logits: Tensor, rows: SamplingRows, first: int, row: int, banned: Banned) -> NDArray[np.int64]:
        n, buffer = logits.shape[0], self._buffer
        slots = slice(first, first + n)
        uniform_N = buffer.uniforms(row, slots).to(self.model.device)
        tokens_N, log_probs_N = self._sampler.sample(logits, rows, uniform_N, banned)
        self._tokens[slots].copy_(tokens_N)
        tokens, log_probs = tokens_N.cpu().numpy(), log_probs_N.cpu().numpy()
        if not math.isfinite(log_probs.sum()):
            slot = first + int(np.flatnonzero(~np.isfinite(log_probs))[0])
            where = f"request {self.running[slot].rid} are not finite at response token {buffer.num_tokens(slot, row)}"
            raise EngineError(nonfinite_logits(where, self.version).text())
        for i, request in enumerate(self.running[slots] if banned else ()):
            if request.grammar is not None:
                request.grammar.add(int(tokens[i]))
        buffer.tokens[row, slots] = tokens
        buffer.log_probs[row, slots] = log_probs
        self.tokens_generated += n
        return tokens

    def _banned(self, n: int, first: int, row: int) -> Banned:
        """Return what `n` slots from `first` on must not sample.

        Before `min_new_tokens`, these are the stop tokens; with a grammar, all tokens that do not follow it.
        """
        early = np.flatnonzero(row < self._buffer.may_stop[first : first + n])
        stops = {int(i): [t for t in self.running[first + i].stop_ids if t < self.model.vocab_size] for i in early}
        grammars = {i: request.grammar for i, request in enumerate(self.running[first : first + n])}
        masks = {i: grammar.banned() for i, grammar in grammars.items() if grammar is not None}
        return {i: tokens for i, tokens in stops.items() if tokens} | masks

    def _finish_ended(self, first: int, tokens: NDArray[np.int64]) -> None:
        slots, buffer = slice(first, first + len(tokens)), self._buffer
        may_stop = buffer.clock >= buffer.may_stop[slots]
        stopped = (tokens == buffer.stop_ids[:, slots]).any(0) & may_stop
        full = buffer.clock >= buffer.ends[slots]
        ended: dict[int, tuple[Literal["stop", "length"], Any]] = {}
        for i in np.flatnonzero(stopped | full):
            ended[first + int(i)] = ("stop", int(tokens[i])) if stopped[i] else ("length", None)
        for i in np.flatnonzero(buffer.has_stop_strings[slots] & may_stop & ~stopped):
            slot = first + int(i)
            request = self.running[slot]
            if matched := self._stop_strings.match(request.params, request.tokens, buffer.response(slot)):
                ended[slot] = ("stop", matched)
        for slot in sorted(ended, reverse=True):
            reason, matched = ended[slot]
            self._leave(slot, reason, matched)

    # -- completion --------------------------------------------------------------------------------------------

    def _flush(self, slot: int) -> None:
        self._report_slot(slot)
        request = self.running[slot]
        tokens, log_probs, routes = self._buffer.take(slot)
        request.tokens += tokens
        request.log_probs += log_probs
        request.versions += [self.version] * len(tokens)
        if self.model.records_routes:
            request.add_routes(routes)

    def _leave(self, slot: int, reason: Literal["stop", "length", "abort"], matched: int | str | None = None) -> None:
        self._flush(slot)
        request, last = self.running[slot], len(self.running) - 1
        if slot != last:
            self._cache.copy(last, slice(slot, slot + 1), int(self._positions[last]) + 1)
            self._tokens[slot] = self._tokens[last]
            self._positions[slot] = self._positions[last]
            self._buffer.move(last, slot)
            self.running[slot] = self.running[last]
        self.running.pop()
        self._clear(last)
        self._plan = None
        request.deliver(request.finish(reason, self.tokenizer, matched))

    def _clear(self, slot: int) -> None:
        self._positions[slot] = 0
        self._tokens[slot] = 0

    def _report_slot(self, slot: int) -> None:
        report = self.running[slot].report
        if report is None:
            return
        tokens, log_probs = self._buffer.unreported(slot)
        if tokens:
            report(Progress(tokens, log_probs, self.version))
