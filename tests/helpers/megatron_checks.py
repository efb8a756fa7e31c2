"""What tests of Megatron layouts compare: the results of `megatron_cases.two_steps`, one of each rank."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PretrainedConfig

from models_zoo import family_config

Found = dict[str, list[Any]]


def changed_config(family: str, changes: dict[str, Any]) -> PretrainedConfig:
    """The config of a tiny model with some fields replaced."""
    config = family_config(family)
    for field, value in changes.items():
        setattr(config, field, value)
    return config


def losses_of(ranks: list[Any]) -> list[float]:
    """The loss of each step, summed over the data-parallel ranks."""
    parts = {rank["data_rank"]: rank["losses"] for rank in ranks}
    return [sum(loss for loss, _ in step) for step in zip(*parts.values(), strict=True)]


def assert_trains_as(found: Found, name: str, reference: str, *, rel: float, loss_abs: float) -> None:
    """Losses and gradient norms of both steps are those of another case."""
    assert losses_of(found[name]) == pytest.approx(losses_of(found[reference]), rel=rel, abs=loss_abs)
    for rank in found[name]:
        assert rank["norms"] == pytest.approx(found[reference][0]["norms"], rel=rel)


def assert_exports_as(found: Found, name: str, reference: str, *, rel: float, near: float) -> None:
    """Weights went out as they were loaded, and those after both steps are another case's."""
    (other,) = found[reference]
    for rank in found[name]:
        assert rank["is_exported_as_loaded"]
        assert rank["weights"].keys() == other["weights"].keys()
        for tensor, values in rank["weights"].items():
            assert values[1] == pytest.approx(other["weights"][tensor][1], rel=rel, abs=near)


def assert_converted(case: dict[str, Any]) -> None:
    """`megatron_lm_cases.converted` found the same tensors, ran both models, and did not overwrite what was there."""
    assert case["codes"] == [0, 2, 0], case["said"]
    assert case["is_same"]
    assert case["said"].count("logits of both models") == 2
    assert "replace it with --force" in case["said"]
