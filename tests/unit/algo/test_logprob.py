from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from furlong.algo import logprob_compiled
from furlong.algo.logprob import stats_from_logits, token_stats

R, V, D = 7, 9, 4


def _inputs(dtype=torch.float64, rows=R):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, V, (rows,), generator=generator)


@pytest.mark.parametrize("chunk_size", [-1, 1, 3, R, 100])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_gradients_equal_finite_differences(as_on_gpu, chunk_size, entropy_grad, softcap, monkeypatch):
    if as_on_gpu:
        monkeypatch.setattr(logprob_compiled, "is_large", lambda *_: True)
    *tensors, targets = _inputs()

    def fused(hidden, weight, bias):
        stats = token_stats(
            hidden,
            weight,
            targets,
            temperature=0.7,
            chunk_size=chunk_size,
            entropy=True,
            entropy_grad=entropy_grad,
            bias_V=bias,
            softcap=softcap,
        )
        return (stats.log_probs_R, stats.entropy_R) if entropy_grad else stats.log_probs_R

    assert torch.autograd.gradcheck(fused, tensors)


@pytest.mark.parametrize("as_on_gpu", [False, True])
@pytest.mark.parametrize("chunk_size", [-1, 2])
def test_values_and_gradients_equal_plain_autograd(as_on_gpu, chunk_size, monkeypatch):
    if as_on_gpu:
        monkeypatch.setattr(logprob_compiled, "is_large", lambda *_: True)
    hidden, weight, bias, targets = _inputs()
    upstream = torch.linspace(-1, 2, R, dtype=torch.float64)
    fused = token_stats(
        hidden, weight, targets, temperature=1.3, chunk_size=chunk_size, entropy=True, entropy_grad=True, bias_V=bias
    )
    ((fused.log_probs_R + 0.3 * fused.entropy_R) * upstream).sum().backward()
    got = [t.grad.clone() for t in (hidden, weight, bias)]
    for tensor in (hidden, weight, bias):
        tensor.grad = None
    plain = stats_from_logits(hidden @ weight.T + bias, targets, temperature=1.3, entropy=True, entropy_grad=True)
    ((plain.log_probs_R + 0.3 * plain.entropy_R) * upstream).sum().backward()
    torch.testing.assert_close(fused.log_probs_R, plain.log_probs_R)
    torch.testing.assert_close(fused.entropy_R, plain.entropy_R)
    for have, tensor in zip(got, (hidden, weight, bias), strict=True):
        torch.testing.assert_close(have, tensor.grad)


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_values_without_gradient_are_bitwise_those_with_gradient(as_on_gpu, monkeypatch):
    assert not logprob_compiled.is_large(torch.zeros(2**14, 1), torch.zeros(2**14, 1))  # only on a GPU
    if as_on_gpu:
        monkeypatch.setattr(logprob_compiled, "is_large", lambda *_: True)
    hidden, weight, _, targets = _inputs(torch.float32)
    args = {"temperature": 1.0, "chunk_size": 3, "entropy": True, "entropy_grad": False}
    with_grad = token_stats(hidden, weight, targets, **args)
    with torch.no_grad():
        without = token_stats(hidden, weight, targets, **args)
    assert torch.equal(with_grad.log_probs_R, without.log_probs_R)
    assert torch.equal(with_grad.entropy_R, without.entropy_R)
    assert with_grad.log_probs_R.requires_grad
    assert not with_grad.entropy_R.requires_grad
    assert not without.log_probs_R.requires_grad


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_chunks_bound_the_largest_tensor_forward_and_backward(entropy_grad):
    rows, vocab = 64, 50
    hidden = torch.randn(rows, D, requires_grad=True)
    weight = torch.randn(vocab, D, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    for chunk_size, bound in ((4, 4 * vocab), (-1, rows * vocab)):
        with _LargestTensor() as seen:
            stats = token_stats(
                hidden,
                weight,
                targets,
                temperature=1.0,
                chunk_size=chunk_size,
                entropy=True,
                entropy_grad=entropy_grad,
                softcap=5.0,
            )
            (stats.log_probs_R.sum() + (stats.entropy_R.sum() if entropy_grad else 0.0)).backward()
        assert seen.numel == max(bound, rows * D, vocab * D)


def test_second_backward_gives_the_same_gradient():
    hidden, weight, _, targets = _inputs()
    stats = token_stats(hidden, weight, targets, temperature=1.0, entropy=False, entropy_grad=False)
    loss = stats.log_probs_R.square().sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk_size", [-1, 2])
def test_frozen_weight_gets_no_gradient_and_hidden_does(chunk_size):
    hidden, weight, _, targets = _inputs()
    frozen = weight.detach()
    args = {"temperature": 1.0, "chunk_size": chunk_size, "entropy": False, "entropy_grad": False}
    token_stats(hidden, frozen, targets, **args).log_probs_R.sum().backward()
    have = hidden.grad.clone()
    hidden.grad = None
    token_stats(hidden, weight, targets, **args).log_probs_R.sum().backward()
    assert frozen.grad is None
    torch.testing.assert_close(have, hidden.grad)


@pytest.mark.parametrize("chunk_size", [-1, 4])
def test_no_rows_give_empty_stats_and_zero_gradient(chunk_size):
    hidden, weight, bias, targets = _inputs(rows=0)
    stats = token_stats(
        hidden, weight, targets, temperature=1.0, chunk_size=chunk_size, entropy=True, entropy_grad=True, bias_V=bias
    )
    (stats.log_probs_R.sum() + stats.entropy_R.sum()).backward()
    assert stats.log_probs_R.shape == (0,)
    assert weight.grad.abs().sum() == 0
    assert bias.grad.abs().sum() == 0


@pytest.mark.parametrize("chunk_size", [-1, 16])
def test_bfloat16_sums_over_the_vocabulary_in_float32(chunk_size):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 8, generator=generator).bfloat16()
    weight = torch.randn(5000, 8, generator=generator).bfloat16()
    targets = torch.randint(0, 5000, (40,), generator=generator)
    logits = (hidden @ weight.T).double()  # rounded to bfloat16 once, as an engine does
    exact = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
    stats = token_stats(
        hidden, weight, targets, temperature=1.0, chunk_size=chunk_size, entropy=True, entropy_grad=False
    )
    assert stats.log_probs_R.dtype == torch.float32
    assert (stats.log_probs_R.double() - exact).abs().max() < 1e-5


# About one rounding to bfloat16; summing 512 parts in bfloat16 gives 4e-2. Products of each chunk are rounded in what a
# GPU runs when a CPU runs it.
@pytest.mark.parametrize(("as_on_gpu", "most"), [(False, 5e-3), (True, 8e-3)])
def test_bfloat16_weight_gradient_does_not_lose_chunks(as_on_gpu, most, monkeypatch):
    if as_on_gpu:
        monkeypatch.setattr(logprob_compiled, "is_large", lambda *_: True)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2048, 8, generator=generator).bfloat16()
    weight = (torch.randn(16, 8, generator=generator) * 0.1).bfloat16()
    targets = torch.randint(0, 16, (2048,), generator=generator)

    def weight_grad(dtype, chunk_size):
        leaf = weight.to(dtype).requires_grad_()
        args = {"temperature": 1.0, "chunk_size": chunk_size, "entropy": False, "entropy_grad": False}
        token_stats(hidden.to(dtype), leaf, targets, **args).log_probs_R.sum().backward()
        return leaf.grad.double()

    exact = weight_grad(torch.float64, -1)
    error = (weight_grad(torch.bfloat16, 4) - exact).abs().max() / exact.abs().max()
    assert error < most


def test_temperature_is_that_of_the_sampler():
    hidden, weight, _, targets = _inputs()
    stats = token_stats(hidden, weight, targets, temperature=0.5, entropy=False, entropy_grad=False)
    by_hand = torch.log_softmax(hidden @ weight.T / 0.5, -1)[torch.arange(R), targets]
    torch.testing.assert_close(stats.log_probs_R, by_hand)
    with pytest.raises(ValueError, match="temperature is 0"):
        token_stats(hidden, weight, targets, temperature=0.0, entropy=False, entropy_grad=False)


def test_forbidden_tokens_have_probability_zero_and_finite_entropy():
    logits = torch.tensor([[1.0, 2.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    stats = stats_from_logits(logits, torch.tensor([1]), temperature=1.0, entropy=True, entropy_grad=True)
    stats.entropy_R.sum().backward()
    two = stats_from_logits(logits[:, :2].detach(), torch.tensor([1]), temperature=1.0, entropy=True)
    torch.testing.assert_close(stats.entropy_R.detach(), two.entropy_R)
    assert torch.isfinite(logits.grad[0, :2]).all()


def test_entropy_is_absent_unless_requested():
    hidden, weight, _, targets = _inputs()
    assert token_stats(hidden, weight, targets, temperature=1.0, entropy=False, entropy_grad=False).entropy_R is None
    assert stats_from_logits(hidden @ weight.T, targets, temperature=1.0, entropy=False).entropy_R is None
