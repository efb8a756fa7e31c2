from __future__ import annotations

import pytest
import torch

from furlong.errors import TrainerError
from furlong.models.router_hooks import MIN_ROWS, check_routes


def test_a_layer_that_was_never_filled_in_is_refused():
    record_lTK = torch.zeros(2, MIN_ROWS, 1, dtype=torch.int16)
    record_lTK[0] = torch.arange(MIN_ROWS)[:, None] % 4
    with pytest.raises(TrainerError, match=f"all of {MIN_ROWS} tokens to expert 0 in layer 7"):
        check_routes(record_lTK, [3, 7])
    record_lTK[1, 5] = 1
    check_routes(record_lTK, [3, 7])


def test_a_row_of_zeros_is_refused_with_several_experts_per_token():
    record_lTK = torch.tensor([[[0, 1], [0, 0]]])
    with pytest.raises(TrainerError, match=r"twice for one token: \[0, 0\] in layer 3"):
        check_routes(record_lTK, [3])


def test_unknown_rows_and_few_rows_of_zeros_are_accepted():
    check_routes(torch.full((1, MIN_ROWS, 1), -1), [0])
    check_routes(torch.zeros(1, MIN_ROWS - 1, 1), [0])
