"""Sums of rows that share an index, added in one order, so that a step repeats bit for bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sum_rows(values_N: Tensor, row_of_N: Tensor, num_rows: int) -> Tensor:
    """Add up `values_N` [N, ...] by the row that each belongs to: [num_rows, ...].

    On a GPU `index_add_` adds in the order in which threads come.
    """
    if num_rows == 1:
        return values_N.sum(0, keepdim=True)
    if values_N.is_cuda:
        return sorted_sums(values_N, row_of_N, num_rows)
    return values_N.new_zeros((num_rows, *values_N.shape[1:])).index_add_(0, row_of_N, values_N)


def sorted_sums(values_N: Tensor, row_of_N: Tensor, num_rows: int) -> Tensor:
    """The same as the gradient of an embedding: its kernel sorts, and adds up pieces of a row's values side by side."""
    shape = values_N.shape[1:]
    values_NW = values_N.reshape(len(values_N), math.prod(shape))
    return torch.ops.aten.embedding_dense_backward(values_NW, row_of_N, num_rows, -1, False).reshape(num_rows, *shape)
