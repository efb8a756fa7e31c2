"""Sums of rows that share an index."""

from __future__ import annotations

import pytest
import torch

from furlong.core.batch import sorted_sums, sum_rows


@pytest.mark.parametrize("sums", [sum_rows, sorted_sums])
@pytest.mark.parametrize("width", [(), (3,), (2, 3)])
def test_row_sums_and_their_gradients(width, sums):
    values = torch.randn(6, *width, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([4, 0, 4, 2, 4, 0])
    want = torch.stack([values[rows == row].sum(0) for row in range(5)])
    torch.testing.assert_close(sums(values, rows, 5), want)
    assert torch.autograd.gradcheck(lambda given: sums(given, rows, 5), (values,))
    torch.testing.assert_close(sums(values, torch.zeros_like(rows), 1), values.sum(0, keepdim=True))
    assert torch.equal(sums(values[:0], rows[:0], 2), torch.zeros(2, *width, dtype=torch.float64))
