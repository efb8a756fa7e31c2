"""Sums of rows that share an index, added in one order, so that a step repeats bit for bit."""

from __future__ import annotations

from torch import Tensor


def sum_rows(values_N: Tensor, row_of_N: Tensor, num_rows: int) -> Tensor:
    """Add up `values_N` [N, ...] by the row that each belongs to: [num_rows, ...].

    On a GPU `index_add` adds in the order in which threads come, and `index_put` sorts first; on a CPU `index_add` goes
    row by row.
    """
    sums = values_N.new_zeros((num_rows, *values_N.shape[1:]))
    if values_N.is_cuda:
        return sums.index_put_((row_of_N,), values_N, accumulate=True)
    return sums.index_add_(0, row_of_N, values_N)
