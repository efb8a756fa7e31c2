"""Sample one token per row of logits, each row with its own parameters and random number.

Axes: N rows, V vocabulary, B blocks of the vocabulary, C candidates.

A token is the inverse of the cumulative distribution at a uniform number from the caller, so it only depends on the
row's logits, parameters and number. Log-probs are log_softmax(logits / temperature) before any filter, and before
tokens are banned, as stop tokens are by `min_new_tokens`. Filters are SGLang's: top-k, top-p and min-p each apply to
the unfiltered distribution, and a token must pass all three. Equal probabilities are ranked by token id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.catalogue import Diagnosis, diagnosis
from furlong.interfaces import SamplingParams

ONE_LEVEL_VOCAB = 512
FIRST_CANDIDATES = 64
NEXT_CANDIDATES = 1024
Banned = Mapping[int, Sequence[int] | Tensor]
"""Tokens that a row must not get: their ids, or a mask [V]."""
NOTHING: Banned = MappingProxyType({})


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of N rows as tensors.

    `greedy`, `plain` and `filtered` are the row indices of each kind: empty for no rows, None for all rows.
    """

    temperature_N1: Tensor | None
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    greedy: Tensor | None
    plain: Tensor | None
    filtered: Tensor | None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRows:
        """Group rows by kind: greedy, plain (no filter), filtered."""
        temperatures = [p.temperature if p.temperature > 0 else 1.0 for p in params]
        kinds = [_kind(p, vocab_size) for p in params]

        def rows_of(kind: str) -> Tensor | None:
            rows = [i for i, k in enumerate(kinds) if k == kind]
            return None if len(rows) == len(kinds) else torch.tensor(rows, dtype=torch.int64, device=device)

        return cls(
            temperature_N1=None
            if all(t == 1.0 for t in temperatures)
            else torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None],
            top_k_N=torch.tensor([p.top_k if p.top_k > 0 else vocab_size for p in params], device=device),
            top_p_N=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            min_p_N=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
            greedy=rows_of("greedy"),
            plain=rows_of("plain"),
            filtered=rows_of("filtered"),
        )


def _kind(params: SamplingParams, vocab_size: int) -> str:
    if params.temperature == 0 or params.top_k == 1:
        return "greedy"
    is_plain = params.top_p >= 1 and params.min_p <= 0 and not 0 < params.top_k < vocab_size
    return "plain" if is_plain else "filtered"


@dataclass(frozen=True)
class SamplingPlan:
    """Inputs of the decode steps while the same `n` requests are in the slots.

    `tokens` and `positions` include padding slots; `active` are the positions of the requests. `first_end` is the row
    in which the first request reaches its limit, `stops_from` the row from which all of them may stop.
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
    has_grammars: bool


class _SamplingBuffers:
    """Scratch tensors for the rows of `mass_NV`: exp(logits - max), zero-padded to whole blocks."""

    def __init__(self, mass_NV: Tensor, vocab_size: int, num_blocks: int) -> None:
        n = len(mass_NV)
        self.mass_NV, self.inside_NV = mass_NV, mass_NV[:, :vocab_size]
        self.parts_NBV = mass_NV.view(n, num_blocks, -1)
        self.peak_N1, self.chosen_N1, self.log_prob_N1 = (mass_NV.new_empty(n, 1) for _ in range(3))
        self.cumulative_NB = mass_NV.new_empty(n, num_blocks if num_blocks > 1 else vocab_size, dtype=torch.float64)
        self.total_N1, self.target_N1 = self.cumulative_NB[:, -1:], self.cumulative_NB.new_empty(n, 1)
        self.token_N1 = mass_NV.new_empty(n, 1, dtype=torch.int64)
        self.token_N, self.log_prob_N = self.token_N1[:, 0], self.log_prob_N1[:, 0]


class Sampler:
    """Samples tokens with reused scratch memory. One per engine; not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # One cumulative sum over a small vocabulary; blocks and then tokens over a large one.
        self.block = vocab_size if vocab_size <= ONE_LEVEL_VOCAB else 1 << (vocab_size.bit_length() + 1) // 2
        self.num_blocks = -(-vocab_size // self.block)
        self._mass = torch.empty(0, dtype=torch.float32)
        self._scratch: _SamplingBuffers | None = None

    def sample(
        self, logits_NV: Tensor, rows: SamplingRows, uniform_N: Tensor, banned: Banned = NOTHING
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [N] int64 and their log-probs [N] float32, both valid until the next call.

        `logits_NV` is float32 and is overwritten; `uniform_N` is float64 in [0, 1). `banned` has the tokens that a row
        must not get; like the filters, they do not change its log-probs. A row with NaN or +inf yields a non-finite
        log-prob.
        """
        if rows.temperature_N1 is not None:
            logits_NV.div_(rows.temperature_N1)
        indices, allowed_I = _ban(logits_NV, banned) if banned else ([], None)
        s = self._scratch_for(logits_NV)
        torch.amax(logits_NV, -1, keepdim=True, out=s.peak_N1)
        torch.sub(logits_NV, s.peak_N1, out=s.inside_NV)
        s.inside_NV.exp_()
        parts_NB = s.mass_NV if self.num_blocks == 1 else s.parts_NBV.sum(-1)
        torch.cumsum(parts_NB, -1, dtype=torch.float64, out=s.cumulative_NB)  # over tokens if there is only one block
        self._choose(s, logits_NV, rows, uniform_N)
        torch.gather(s.mass_NV, 1, s.token_N1, out=s.chosen_N1)
        torch.div(s.chosen_N1, s.total_N1, out=s.target_N1).log_()
        s.log_prob_N1.copy_(s.target_N1)
        if allowed_I is not None:
            s.log_prob_N[indices] += allowed_I
        return s.token_N, s.log_prob_N

    def _scratch_for(self, logits_NV: Tensor) -> _SamplingBuffers:
        n, device, scratch = logits_NV.shape[0], logits_NV.device, self._scratch
        if scratch is not None and len(scratch.mass_NV) == n and scratch.mass_NV.device == device:
            return scratch
        if self._mass.shape[0] < n or self._mass.device != device:
            self._mass = torch.zeros(n, self.num_blocks * self.block, dtype=torch.float32, device=device)
        self._scratch = _SamplingBuffers(self._mass[:n], self.vocab_size, self.num_blocks)
        return self._scratch

    def _choose(self, s: _SamplingBuffers, logits_NV: Tensor, rows: SamplingRows, uniform_N: Tensor) -> None:
        if rows.plain is None and self.num_blocks == 1:
            torch.mul(uniform_N[:, None], s.total_N1, out=s.target_N1)
            _first_above(s.cumulative_NB, s.target_N1, s.token_N1)
            return
        if rows.greedy is None:
            s.token_N.copy_(logits_NV.argmax(-1))
        elif len(rows.greedy):
            s.token_N[rows.greedy] = logits_NV[rows.greedy].argmax(-1)
        for index, draw in ((rows.plain, self._draw), (rows.filtered, self._draw_filtered)):
            if index is None:
                s.token_N.copy_(draw(s.mass_NV, s.cumulative_NB, rows, uniform_N))
            elif len(index):
                taken = _take(rows, index)
                s.token_N[index] = draw(s.mass_NV[index], s.cumulative_NB[index], taken, uniform_N[index])

    def _draw(self, mass_NV: Tensor, cumulative_NB: Tensor, _rows: SamplingRows, uniform_N: Tensor) -> Tensor:
        """Inverse of the cumulative distribution: the block, then the token within."""
        target_N1 = (uniform_N * cumulative_NB[:, -1])[:, None]
        block_N1 = _first_above(cumulative_NB, target_N1)
        if self.num_blocks == 1:
            return block_N1[:, 0]
        before_N1 = torch.where(block_N1 > 0, cumulative_NB.gather(1, (block_N1 - 1).clamp_(min=0)), 0.0)
        places = block_N1 * self.block + torch.arange(self.block, device=mass_NV.device)
        inside = mass_NV.gather(1, places).cumsum(-1, dtype=torch.float64)
        # A block's sum in float32 and its tokens' in float64 differ by rounding: stay below the latter.
        last_N1 = (inside < inside[:, -1:]).sum(-1, keepdim=True)
        token_N1 = torch.minimum(_first_above(inside, target_N1 - before_N1), last_N1)
        return (block_N1 * self.block + token_N1)[:, 0]

    def _draw_filtered(self, mass_NV: Tensor, cumulative_NB: Tensor, rows: SamplingRows, uniform_N: Tensor) -> Tensor:
        """Rank the most likely candidates, with more of them until every row is decided."""
        tokens_N = torch.empty(mass_NV.shape[0], dtype=torch.int64, device=mass_NV.device)
        open_rows = torch.arange(mass_NV.shape[0], device=mass_NV.device)
        for num in (FIRST_CANDIDATES, NEXT_CANDIDATES, self.vocab_size):
            num = min(num, self.vocab_size)
            part = _take(rows, open_rows)
            total_N1 = cumulative_NB[open_rows, -1:]
            tokens, decided = _draw_ranked(
                mass_NV[open_rows, : self.vocab_size], total_N1, part, uniform_N[open_rows], num
            )
            tokens_N[open_rows] = tokens
            open_rows = open_rows[~decided]
            if not len(open_rows):
                break
        return tokens_N


def _ban(logits_NV: Tensor, banned: Banned) -> tuple[list[int], Tensor]:
    indices = list(banned)
    before_I = logits_NV[indices].double().logsumexp(-1)
    for row, tokens in banned.items():
        index = tokens.to(logits_NV.device) if isinstance(tokens, Tensor) else list(tokens)
        logits_NV[row, index] = float("-inf")
    return indices, (logits_NV[indices].double().logsumexp(-1) - before_I).float()


def _draw_ranked(
    mass_NV: Tensor, total_N1: Tensor, rows: SamplingRows, uniform_N: Tensor, num: int
) -> tuple[Tensor, Tensor]:
    if num < mass_NV.shape[1]:
        ids_NC = mass_NV.topk(num, dim=-1, sorted=False).indices.sort(-1).values
        mass_NC, order = mass_NV.gather(1, ids_NC).sort(dim=-1, descending=True, stable=True)
        ids_NC = ids_NC.gather(1, order)
    else:
        mass_NC, ids_NC = mass_NV.sort(dim=-1, descending=True, stable=True)
    probs_NC = mass_NC.double() / total_N1
    before_NC = probs_NC.cumsum(-1) - probs_NC
    passes = before_NC <= rows.top_p_N[:, None]
    passes &= torch.arange(num, device=mass_NV.device)[None] < rows.top_k_N[:, None]
    passes &= probs_NC >= rows.min_p_N[:, None] * probs_NC[:, :1]
    passes[:, 0] = True
    kept_NC = torch.where(passes, probs_NC, 0.0).cumsum(-1)
    chosen_N1 = _first_above(kept_NC, uniform_N[:, None] * kept_NC[:, -1:])
    last_kept_N1 = passes.sum(-1, keepdim=True) - 1
    # The smallest candidates may tie with tokens that were left out, so they decide nothing.
    decided = (mass_NC.gather(1, last_kept_N1) > mass_NC[:, -1:])[:, 0]
    if num == mass_NV.shape[1]:
        decided = torch.ones_like(decided)
    return ids_NC.gather(1, chosen_N1)[:, 0], decided


def _first_above(cumulative: Tensor, target: Tensor, into: Tensor | None = None) -> Tensor:
    """Index [N, 1] of the first entry above `target` [N, 1].

    It exists if the target is the last entry times a uniform number below 1; a row of NaN gets the last index.
    """
    return torch.searchsorted(cumulative, target, right=True, out=into).clamp_(max=cumulative.shape[-1] - 1)


def _take(rows: SamplingRows, index: Tensor) -> SamplingRows:
    return SamplingRows(
        None, rows.top_k_N[index], rows.top_p_N[index], rows.min_p_N[index], rows.greedy, rows.plain, rows.filtered
    )


def nonfinite_logits(where: str, version: int) -> Diagnosis:
    """Return diagnosis NUM04 of the initial weights (version 0), or of weights after a training step."""
    finding = f"the logits of {where}, with weights of version {version}"
    if version == 0:
        cause = "The model's weights contain NaN or infinity, or overflow in this dtype."
        remedy = "check the values in its files with `furlong check DIR`; try --fp32"
        return diagnosis("NUM04", finding, cause=cause, remedy=remedy)
    cause = "The last training step left NaN or infinity in the weights."
    remedy = "lower --lr or --clip-grad, or use --fp32; resume from a checkpoint before that step"
    return diagnosis("NUM04", finding, cause=cause, remedy=remedy)
