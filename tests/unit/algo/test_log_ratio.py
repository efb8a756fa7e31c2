from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.algo.log_ratio import bounded_exp, kl_estimate


def _distributions():
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    q = torch.softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    return p, q, (p * (p / q).log()).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl(kind):
    p, q, kl = _distributions()
    torch.testing.assert_close((p * kl_estimate(p.log(), q.log(), kind)).sum(), kl)


def test_estimators_are_their_formulas():
    live, ref = torch.tensor([-1.0, -0.2, -12.0]), torch.tensor([-1.5, -0.1, -1.0])
    d = live - ref
    torch.testing.assert_close(kl_estimate(live, ref, "k1"), d)
    torch.testing.assert_close(kl_estimate(live, ref, "k2"), d**2 / 2)
    torch.testing.assert_close(kl_estimate(live, ref, "k3"), torch.exp(-d) + d - 1)
    assert kl_estimate(live, ref, "low_var_kl")[2].item() == 10.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("start", [[-1.0, -0.5, -2.0], [-1.0 + 3e-4, -0.6 - 1e-5, -1.7]])
def test_gradients_equal_finite_differences(kind, start):
    live = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -0.6, -1.7], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind), (live,))
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind, ratio_R=torch.exp(x + 0.9)), (live,))


def test_ratio_weighted_estimate_has_the_gradient_of_the_kl_off_policy():
    _, q, _ = _distributions()
    old = torch.softmax(torch.linspace(-1, 1, 6, dtype=torch.float64), 0)
    logits = torch.randn(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    live = torch.log_softmax(logits, 0)
    estimate = (old * kl_estimate(live, q.log(), "k3", ratio_R=(live - old.log()).exp())).sum()
    exact = (live.exp() * (live - q.log())).sum()
    torch.testing.assert_close(estimate, exact)
    have, want = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, exact))
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize(("kind", "share"), [("k1", 0.0), ("k2", 1.0)])
def test_as_a_loss_on_the_policys_own_samples_k2_has_the_gradient_of_the_kl_and_k1_none(kind, share):
    _, q, _ = _distributions()
    logits = torch.randn(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    live = torch.log_softmax(logits, 0)
    loss = (live.detach().exp() * kl_estimate(live, q.log(), kind)).sum()
    exact = (live.exp() * (live - q.log())).sum()
    have, want = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, exact))
    torch.testing.assert_close(have, share * want)


@settings(max_examples=300, deadline=None)
@given(
    live=st.lists(st.floats(-400, 0, width=32), min_size=1, max_size=5),
    shift=st.floats(-400, 400, width=32),
    log_ratio=st.floats(-200, 200, width=32),
    kind=st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
)
def test_values_and_gradients_are_finite_for_any_log_ratio(live, shift, log_ratio, kind):
    live_R = torch.tensor(live, requires_grad=True)
    ratio_R = bounded_exp(live_R - live_R.detach() + log_ratio)
    kl_R = kl_estimate(live_R, live_R.detach() + shift, kind, ratio_R=ratio_R)
    (0.0 * kl_R).sum().backward(retain_graph=True)
    assert live_R.grad.eq(0).all()
    kl_R.sum().backward()
    assert kl_R.isfinite().all()
    assert live_R.grad.isfinite().all()
    if kind == "low_var_kl":
        assert kl_R.abs().max() <= 10.0


def test_low_var_kl_clamps_the_weighted_estimate():
    live, ref = torch.tensor([-6.0], requires_grad=True), torch.tensor([-4.0])
    kl = kl_estimate(live, ref, "low_var_kl", ratio_R=torch.tensor([3.0]))
    assert kl.item() == 10.0
    kl.backward()
    assert live.grad.item() == 0.0
    small = kl_estimate(live, ref, "low_var_kl", ratio_R=torch.tensor([0.5]))
    torch.testing.assert_close(small, 0.5 * kl_estimate(live, ref, "k3"))
