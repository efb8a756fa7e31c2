"""Comparisons of the results of `megatron_cases.two_steps`, one per rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
from transformers import PretrainedConfig

from models_zoo import family_config

Results = dict[str, list[Any]]


def changed_config(family: str, changes: dict[str, Any]) -> PretrainedConfig:
    """Return the config of a tiny model with some fields replaced."""
    config = family_config(family)
    for field, value in changes.items():
        setattr(config, field, value)
    return config


def losses_of(ranks: list[Any]) -> list[float]:
    """Return the loss of each step, summed over data-parallel ranks."""
    parts = {rank["data_rank"]: rank["losses"] for rank in ranks}
    return [sum(loss for loss, _ in step) for step in zip(*parts.values(), strict=True)]


def assert_trains_as(results: Results, name: str, reference: str, *, rel: float, loss_abs: float) -> None:
    """Assert that losses and gradient norms of both steps equal those of another case."""
    assert losses_of(results[name]) == pytest.approx(losses_of(results[reference]), rel=rel, abs=loss_abs)
    for rank in results[name]:
        assert rank["norms"] == pytest.approx(results[reference][0]["norms"], rel=rel)


def assert_exports_as(results: Results, name: str, reference: str, *, rel: float, near: float) -> None:
    """Assert that exports equal the loaded weights, and that weights after both steps equal another case's."""
    (other,) = results[reference]
    for rank in results[name]:
        assert rank["is_exported_as_loaded"]
        assert rank["weights"].keys() == other["weights"].keys()
        for tensor, values in rank["weights"].items():
            assert values[1] == pytest.approx(other["weights"][tensor][1], rel=rel, abs=near)


def assert_converted(case: dict[str, Any]) -> None:
    """Assert that `megatron_lm_cases.converted` kept all tensors, ran both models, and overwrote nothing."""
    assert case["codes"] == [0, 2, 0], case["output"]
    assert case["is_same"]
    assert case["output"].count("logits of both models") == 2
    assert "--force" in case["output"]


def often(names: Iterable[str], daily: Collection[str]) -> list[Any]:
    """Return parameters of a test; those that are not in `daily` run only in `make nightly`."""
    return [name if name in daily else pytest.param(name, marks=pytest.mark.nightly) for name in names]


def wanted(request: pytest.FixtureRequest, needs: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the names that the selected tests of a module read: their parameters, and `needs` by test."""
    names: set[str] = set()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
            names |= {*needs.get(item.originalname, ()), *(each for each in parameters if isinstance(each, str))}
    return names


def with_sources(names: Collection[str], sources: Mapping[str, Collection[str]]) -> set[str]:
    """Return names with all names whose files or results they read."""
    found, left = set[str](), list(names)
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += sources.get(name, ())
    return found
