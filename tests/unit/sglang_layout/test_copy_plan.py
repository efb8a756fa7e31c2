"""Recording the copies of a bucket, and repeating them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.sglang_layout.copy_plan import CopyRecorder

EXPERTS, WIDTH, HIDDEN = 6, 4, 8


def bucket(*, fill: float | None = None) -> torch.Tensor:
    """Gate, up and down projections of all experts, one after another, as bytes."""
    values = torch.arange(EXPERTS * 3 * WIDTH * HIDDEN, dtype=torch.float32)
    return (values if fill is None else torch.full_like(values, fill)).view(torch.uint8)


def experts(buffer: torch.Tensor) -> list[torch.Tensor]:
    return list(buffer.view(torch.float32).view(EXPERTS * 3, WIDTH * HIDDEN))


def parameters() -> dict[str, torch.Tensor]:
    return {"w13": torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN), "w2": torch.zeros(EXPERTS, HIDDEN, WIDTH)}


def load(named: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Store experts as SGLang does, the down projections transposed by way of a copy."""
    pieces = experts(buffer)
    for expert in range(EXPERTS):
        gate, up, down = (pieces[3 * expert + i].view(WIDTH, HIDDEN) for i in range(3))
        named["w13"][expert].narrow(0, 0, WIDTH).copy_(gate)
        named["w13"][expert, WIDTH:] = up
        named["w2"][expert].copy_(down.t().contiguous())


def ranges(buffer: torch.Tensor) -> list[tuple[int, int]]:
    size = WIDTH * HIDDEN * 4
    return [(begin, begin + size) for begin in range(0, buffer.nbytes, size)]


def recorded(action, named, buffer):
    with CopyRecorder(buffer, named) as recorder:
        action(named, buffer)
    return recorder.plan(ranges(buffer))


def test_the_experts_of_a_layer_are_copied_together():
    plan = recorded(load, parameters(), bucket(fill=0.0))
    assert plan is not None
    assert len(plan.copies) == 2
    repeated, right = parameters(), parameters()
    assert plan.fits(repeated)
    plan.run(bucket(), repeated)
    load(right, bucket())
    for name, tensor in right.items():
        assert torch.equal(repeated[name], tensor)


def test_a_plan_is_for_the_layouts_that_it_was_recorded_with():
    plan = recorded(load, parameters(), bucket())
    assert plan is not None
    assert not plan.fits(parameters() | {"w2": torch.zeros(EXPERTS, WIDTH, HIDDEN)})
    assert not plan.fits({"w13": parameters()["w13"]})


def scaled(named, buffer):
    load(named, buffer)
    named["w13"].mul_(2)


def from_elsewhere(named, buffer):
    load(named, buffer)
    named["w2"][0].copy_(torch.ones(HIDDEN, WIDTH))


def computed(named, buffer):
    load(named, buffer)
    named["w13"][0, :WIDTH].copy_(experts(buffer)[0].view(WIDTH, HIDDEN) + 1)


def to_elsewhere(named, buffer):
    load(named, buffer)
    torch.zeros(WIDTH, HIDDEN).copy_(experts(buffer)[0].view(WIDTH, HIDDEN))


def filled_before(named, buffer):
    named["w13"][0].fill_(7)
    load(named, buffer)


def twice(named, buffer):
    load(named, buffer)
    named["w13"][0, :WIDTH].copy_(experts(buffer)[3].view(WIDTH, HIDDEN))


def without_one(named, buffer):
    named["w13"][0, :WIDTH].copy_(experts(buffer)[0].view(WIDTH, HIDDEN))


def depending_on_values(named, buffer):
    load(named, buffer)
    experts(buffer)[0][0].item()


@pytest.mark.parametrize(
    "action",
    [scaled, from_elsewhere, computed, to_elsewhere, filled_before, twice, without_one, depending_on_values],
    ids=lambda f: f.__name__,
)
def test_what_is_more_than_copies_has_no_plan(action):
    assert recorded(action, parameters(), bucket()) is None


def test_padding_is_filled_again():
    def padded(named, buffer):
        load(named, buffer)
        named["w13"][0, 0].fill_(7)

    plan = recorded(padded, parameters(), bucket())
    assert plan is not None
    repeated, right = parameters(), parameters()
    plan.run(bucket(fill=3.0), repeated)
    padded(right, bucket(fill=3.0))
    assert torch.equal(repeated["w13"], right["w13"])


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_order_of_shards_is_repeated_exactly(data):
    order = data.draw(st.permutations(range(EXPERTS * 2)))
    first, size = data.draw(st.integers(0, WIDTH - 1)), data.draw(st.integers(1, WIDTH))
    size = min(size, WIDTH - first)

    def sharded(named, buffer):
        for number in order:
            expert, half = divmod(number, 2)
            piece = experts(buffer)[3 * expert + half].view(WIDTH, HIDDEN).narrow(0, first, size)
            named["w13"][expert].narrow(0, half * WIDTH, size).copy_(piece)
            if half:
                continue
            named["w2"][expert].t()[:size].copy_(experts(buffer)[3 * expert + 2].view(WIDTH, HIDDEN)[first:][:size])

    plan = recorded(sharded, parameters(), bucket())
    assert plan is not None
    repeated, right = parameters(), parameters()
    plan.run(bucket(), repeated)
    sharded(right, bucket())
    assert all(torch.equal(repeated[name], right[name]) for name in right)
