from __future__ import annotations

import numpy as np
import pytest
import torch

from furlong.inference.embedded.request import uniforms
from furlong.inference.embedded.sampler import Sampler, SamplingRows
from furlong.interfaces import SamplingParams

CPU = torch.device("cpu")


def draw(logits_NV, params, uniform_N):
    rows = SamplingRows.build(params, logits_NV.shape[1], CPU)
    return Sampler(logits_NV.shape[1]).sample(logits_NV.clone(), rows, torch.as_tensor(uniform_N, dtype=torch.float64))


def allowed_by_definition(logits_V, params):
    """The tokens that pass the filters and their probabilities, by a slow loop over the sorted distribution."""
    probs = torch.softmax(logits_V.double() / params.temperature, -1).numpy()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        if rank == 0 or (
            (params.top_k < 0 or rank < params.top_k)
            and before <= params.top_p
            and probs[token] >= params.min_p * probs[order[0]]
        ):
            kept[token] = probs[token]
        before += probs[token]
    return {token: p / sum(kept.values()) for token, p in kept.items()}


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.3),
    SamplingParams(temperature=1.7, top_k=40, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [37, 500])
def test_samples_follow_the_filtered_distribution(params, vocab):
    torch.manual_seed(vocab)
    logits_V = torch.randn(vocab) * 2
    n = 20000
    uniform = (np.arange(n) + 0.5) / n  # stratified, so that counts are n p to within one per token
    tokens, _ = draw(logits_V.repeat(n, 1), [params] * n, uniform)
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    reference = allowed_by_definition(logits_V, params)
    assert set(np.flatnonzero(counts)) <= set(reference)
    for token, p in reference.items():
        assert abs(counts[token] - n * p) <= 1.5


def test_independent_uniforms_pass_a_chi_square_test():
    torch.manual_seed(0)
    logits_V = torch.randn(50)
    n = 50000
    stream = np.concatenate([uniforms((seed, 0), 0, 250) for seed in range(n // 250)])
    tokens, _ = draw(logits_V.repeat(n, 1), [SamplingParams()] * n, stream)
    expected = n * torch.softmax(logits_V.double(), -1).numpy()
    chi_square = ((np.bincount(tokens.numpy(), minlength=50) - expected) ** 2 / expected).sum()
    assert chi_square < 85.4  # 49 degrees of freedom, p = 0.001


def test_log_probs_are_of_the_tempered_distribution_before_filters():
    torch.manual_seed(1)
    logits = torch.randn(6, 300) * 3
    params = [SamplingParams(temperature=0.5, top_k=3, top_p=0.8)] * 6
    tokens, log_probs = draw(logits, params, np.linspace(0, 0.99, 6))
    reference = torch.log_softmax(logits / 0.5, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, reference, atol=1e-5, rtol=0)


def test_temperature_zero_is_greedy_with_log_probs_at_temperature_one():
    logits = torch.randn(4, 90)
    tokens, log_probs = draw(logits, [SamplingParams(temperature=0.0)] * 4, [0.9] * 4)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1).amax(-1), atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_other_rows():
    torch.manual_seed(2)
    kinds = [*FILTERS, SamplingParams(temperature=0.0)]
    params = [kinds[i % len(kinds)] for i in range(40)]
    logits, uniform = torch.randn(40, 2000), np.random.default_rng(0).random(40)
    tokens, log_probs = draw(logits, params, uniform)
    for i in range(40):
        alone, alone_log_prob = draw(logits[i : i + 1], params[i : i + 1], uniform[i : i + 1])
        assert (alone.item(), alone_log_prob.item()) == (tokens[i].item(), log_probs[i].item())


def test_a_flat_distribution_under_top_p_needs_more_candidates_and_stays_exact():
    params = SamplingParams(top_p=0.5)
    logits_V = torch.linspace(0, 1e-3, 3000)
    tokens, _ = draw(logits_V.repeat(64, 1), [params] * 64, (np.arange(64) + 0.5) / 64)
    reference = allowed_by_definition(logits_V, params)
    assert set(tokens.tolist()) <= set(reference)
    assert len(set(tokens.tolist())) == 64


def test_equal_probabilities_are_ranked_by_token_id():
    tokens, _ = draw(torch.zeros(10, 200), [SamplingParams(top_k=4)] * 10, (np.arange(10) + 0.5) / 10)
    assert set(tokens.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_extreme_uniforms_never_draw_an_impossible_token(uniform):
    logits = torch.full((3, 77), float("-inf"))
    logits[:, 20:30] = torch.randn(3, 10)
    for params in FILTERS:
        tokens, log_probs = draw(logits, [params] * 3, [uniform] * 3)
        assert all(20 <= t < 30 for t in tokens.tolist())
        assert torch.isfinite(log_probs).all()


def test_uniform_streams_differ_by_seed_and_kind_and_have_random_access():
    streams = [uniforms((seed, kind), 0, 700) for seed in (0, 1) for kind in (0, 1)]
    assert len(np.unique(np.concatenate(streams))) == 4 * 700
    for start, count in ((0, 1), (3, 6), (255, 257), (512, 0), (699, 1)):
        assert np.array_equal(uniforms((1, 0), start, count), streams[2][start : start + count])


def test_samples_do_not_depend_on_the_default_dtype_which_another_thread_may_have_set():
    params = [SamplingParams(temperature=0.7)] * 4
    reference = draw(torch.linspace(-1, 1, 37).expand(4, -1), params, [0.1, 0.4, 0.6, 0.9])
    try:
        torch.set_default_dtype(torch.bfloat16)
        result = draw(torch.linspace(-1, 1, 37, dtype=torch.float32).expand(4, -1), params, [0.1, 0.4, 0.6, 0.9])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(reference, result, strict=True))


@pytest.mark.parametrize("vocab", [37, 600])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=3)], ids=str
)
def test_banned_tokens_are_not_drawn_and_leave_log_probs_unchanged(vocab, params):
    torch.manual_seed(0)
    logits_NV = torch.randn(64, vocab)
    logits_NV[:, 5] += 40  # nearly all of the probability
    rows = SamplingRows.build([params] * 64, vocab, CPU)
    uniform = torch.rand(64, dtype=torch.float64)
    banned = {row: [5, 7] for row in range(0, 64, 2)}
    tokens, log_probs = Sampler(vocab).sample(logits_NV.clone(), rows, uniform, banned)
    want = torch.log_softmax(logits_NV.double() / params.temperature, -1).gather(1, tokens[:, None])[:, 0]
    assert not {5, 7} & set(tokens[::2].tolist())
    assert set(tokens[1::2].tolist()) == {5}
    assert torch.allclose(log_probs.double(), want, rtol=1e-5, atol=1e-5)
