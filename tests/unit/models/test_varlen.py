"""Variable-length attention without a GPU: the code around the kernels, with kernels in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from furlong.models import varlen_attention
from furlong.models.varlen_attention import round_up_length


def dense(q_LHE, k_LKE, v_LKE, *, scale):
    """cuDNN's result for one sequence, with every row computed."""
    repeats, length = q_LHE.shape[1] // k_LKE.shape[1], len(q_LHE)
    k_HLE, v_HLE = (tensor.repeat_interleave(repeats, 1).transpose(0, 1) for tensor in (k_LKE, v_LKE))
    scores = q_LHE.transpose(0, 1) @ k_HLE.transpose(1, 2) * scale
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v_HLE).transpose(0, 1), scores.logsumexp(-1)


def dense_backward(grad_LHE, q_LHE, k_LKE, v_LKE, out_LHE, *, lse_HL, scale):
    """The gradient as kernels compute it: probabilities from the log denominators, not from a new softmax."""
    kv_heads, repeats, length = k_LKE.shape[1], q_LHE.shape[1] // k_LKE.shape[1], len(q_LHE)
    k_HLE, v_HLE = (tensor.repeat_interleave(repeats, 1).transpose(0, 1) for tensor in (k_LKE, v_LKE))
    q_HLE, grad_HLE, out_HLE = (tensor.transpose(0, 1) for tensor in (q_LHE, grad_LHE, out_LHE))
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    probs = ((q_HLE @ k_HLE.transpose(1, 2) * scale).masked_fill(hidden, float("-inf")) - lse_HL[..., None]).exp()
    inner = (grad_HLE * out_HLE).sum(-1, keepdim=True)
    grad_scores = probs * (grad_HLE @ v_HLE.transpose(1, 2) - inner) * scale
    grads = (grad_scores @ k_HLE, grad_scores.transpose(1, 2) @ q_HLE, probs.transpose(1, 2) @ grad_HLE)
    q_grad, *kv_grads = grads
    return q_grad.transpose(0, 1), *(g.unflatten(0, (kv_heads, repeats)).sum(1).transpose(0, 1) for g in kv_grads)


@pytest.mark.parametrize("lengths", [[70, 1, 130], [64], [5, 0, 3]])
def test_rounded_sequences_neither_read_nor_change_their_neighbours(lengths, monkeypatch):
    monkeypatch.setattr(varlen_attention, "_dense", dense)
    monkeypatch.setattr(varlen_attention, "_dense_backward", dense_backward)
    torch.manual_seed(0)
    inputs = [torch.randn(sum(lengths), n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    upstream = torch.randn(sum(lengths), 4, 8, dtype=torch.float64)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()

    want = torch.cat([dense(*parts, scale=0.3)[0] for parts in zip(*(t.split(lengths) for t in inputs), strict=True)])
    want_grads = torch.autograd.grad(want, inputs, upstream)
    detached = [tensor.detach() for tensor in inputs]
    got, lse_HT = varlen_attention._by_sequence(*detached, offsets, 0.3)
    got_grads = varlen_attention._by_sequence_backward((upstream, *detached, got), lse_HT, offsets, 0.3)

    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    for have, grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(have, grad, rtol=1e-5, atol=1e-6)


def test_lengths_are_rounded_to_few_close_values():
    lengths = range(1, 40_000)
    rounded = [round_up_length(length) for length in lengths]
    assert all(0 <= r - n < max(64, n / 15) for n, r in zip(lengths, rounded, strict=True))
    assert len(set(rounded)) < 110
    assert all(round_up_length(r) == r for r in rounded)


def test_there_are_no_kernels_off_the_gpu():
    assert varlen_attention.missing(torch.device("cpu")) == "the device is cpu"
