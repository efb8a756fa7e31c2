"""Generated tokens of all slots and their stop conditions, one row for each decode step.

Rows are numbered by one clock for all slots, so a step writes whole rows and little else. A new request samples its
first token in the newest row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.routing import Routes, RoutingShape
from furlong.inference.embedded.request import Request, uniforms

ROWS = 256


class TokenBuffer:
    """Arrays [row, slot] of tokens, log-probs, random numbers and routes.

    Rows below `clock` are written. The tokens of slot s are in rows `starts[s]` to `clock`. It must stop when the clock
    reaches `ends[s]`, and may stop earlier from `may_stop[s]` on.
    """

    def __init__(self, slots: int, routing: RoutingShape | None) -> None:
        self.clock = 1
        self.tokens = np.zeros((ROWS, slots), np.int64)
        self.log_probs = np.zeros((ROWS, slots), np.float32)
        self._uniforms = np.zeros((ROWS, slots))
        sizes = (0, 0) if routing is None else (routing.num_layers, routing.top_k)
        self.routes = np.zeros((ROWS, slots, *sizes), np.int16)
        self.starts = np.zeros(slots, np.int64)
        self.ends = np.zeros(slots, np.int64)
        self.may_stop = np.zeros(slots, np.int64)
        self.has_stop_strings = np.zeros(slots, np.bool_)
        self.stop_ids = np.full((0, slots), -1, np.int64)
        self._before = np.zeros(slots, np.int64)  # response tokens in earlier rows
        self._reported = np.zeros(slots, np.int64)  # the row up to which tokens were reported
        self._routed = np.zeros(slots, np.int64)  # the first row with routes

    @property
    def is_full(self) -> bool:
        """Whether there is no row left for another step."""
        return self.clock == ROWS

    def open(self, slot: int, request: Request) -> None:
        """Assign a slot to a request whose next token is sampled in the newest row."""
        row, have = self.clock - 1, len(request.tokens)
        self.starts[slot] = self._reported[slot] = row
        self._before[slot] = have
        self._routed[slot] = self.clock
        self.ends[slot] = row + request.limit - have
        self.may_stop[slot] = row + request.params.min_new_tokens - have
        self.has_stop_strings[slot] = bool(request.params.stop)
        count = len(request.stop_ids)
        if count > len(self.stop_ids):
            more = np.full((count - len(self.stop_ids), self.stop_ids.shape[1]), -1, np.int64)
            self.stop_ids = np.concatenate([self.stop_ids, more])
        self.stop_ids[:count, slot] = request.stop_ids
        self.stop_ids[count:, slot] = -1
        self._draw_uniforms(slot, request, row)

    def rewind(self, requests: list[Request]) -> None:
        """Continue with the first row, after `take` of every slot; slot i has `requests[i]`."""
        passed, n = self.clock - 1, len(requests)
        for array in (self.starts, self.ends, self.may_stop, self._reported, self._routed):
            array[:n] -= passed
        self.clock = 1
        for slot, request in enumerate(requests):
            self._draw_uniforms(slot, request, 1)

    def _draw_uniforms(self, slot: int, request: Request, row: int) -> None:
        """Fill in the random numbers of all tokens that fit into the remaining rows."""
        count = min(ROWS, int(self.ends[slot])) - row
        self._uniforms[row : row + count, slot] = uniforms(request.key, self.num_tokens(slot, row), count)

    def num_tokens(self, slot: int, row: int) -> int:
        """Number of response tokens of a slot before `row`."""
        return int(self._before[slot]) + row - int(self.starts[slot])

    def uniforms(self, row: int, slots: slice) -> Tensor:
        """Random numbers for the tokens of a row."""
        return torch.from_numpy(self._uniforms[row, slots])

    def response(self, slot: int) -> NDArray[np.int64]:
        """Tokens of a slot since the last `take`."""
        return self.tokens[self.starts[slot] : self.clock, slot]

    def take(self, slot: int) -> tuple[list[int], list[float], Routes]:
        """Remove and return a slot's tokens, log-probs and routes of the processed tokens."""
        rows = slice(int(self.starts[slot]), self.clock)
        routes = self.routes[int(self._routed[slot]) : self.clock, slot].copy()
        self._before[slot] += self.clock - rows.start
        self.starts[slot] = self._reported[slot] = self._routed[slot] = self.clock
        return self.tokens[rows, slot].tolist(), self.log_probs[rows, slot].tolist(), routes

    def unreported(self, slot: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs since the last call."""
        rows = slice(int(self._reported[slot]), self.clock)
        self._reported[slot] = self.clock
        return self.tokens[rows, slot].tolist(), self.log_probs[rows, slot].tolist()

    def move(self, source: int, target: int) -> None:
        """Move the contents of slot `source` to slot `target`."""
        arrays = (self.starts, self.ends, self.may_stop, self.has_stop_strings)
        for array in (*arrays, self._before, self._reported, self._routed):
            array[target] = array[source]
        self.stop_ids[:, target] = self.stop_ids[:, source]
        rows = slice(int(self.starts[source]), self.clock)
        for buffer in (self.tokens, self.log_probs, self.routes):
            buffer[rows, target] = buffer[rows, source]
        self._uniforms[self.clock :, target] = self._uniforms[self.clock :, source]
