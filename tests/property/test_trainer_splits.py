"""A step does not depend on the packing, splits or order of its samples; its gradient matches finite differences."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import fsdp_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.algo.reduce import loss_weights
from furlong.config.sections import AlgoFlags
from furlong.core.batch import pack_micro_batch
from furlong.core.metric import merge
from furlong.models import hf_model as hf
from furlong.models.packed_layout import plan_layout
from models_zoo import family_config, random_batch

FLAGS = AlgoFlags(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.05, eps_clip=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf.save_model(hf.build_model(family_config("qwen3"), seed=0), path)
    return path


@pytest.fixture(scope="module")
def backend(folder):
    backend = fsdp_backend(folder, dtype=torch.float64)
    for module in backend.actor.model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # the version in transformers rounds to float32
            module.forward = functools.partial(_rms_norm, module)
    return backend


def _rms_norm(module, x):
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


groups = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 25), min_size=1, max_size=4)), min_size=1, max_size=4
)


def filled(batch, seed=0):
    """Fill the columns that the loss reads, off-policy enough for clipping to apply."""
    rng = np.random.default_rng(seed)
    count = len(batch.loss_masks)
    return batch.with_columns(
        advantages=rng.normal(size=count).astype(np.float32),
        old_log_probs=(-3.7 + 0.3 * rng.normal(size=count)).astype(np.float32),
        ref_log_probs=(-3.7 + 0.3 * rng.normal(size=count)).astype(np.float32),
    )


def step(backend, batch, splits, *, share_prompts=True):
    """Return loss and gradients of one step, computed in micro-batches."""
    rows = [np.asarray(part) for part in splits]
    weights = loss_weights(batch, [np.concatenate(rows)], mode="rollout", constant_len=None)
    backend.actor.share_prompts = share_prompts
    backend.optimizer.zero_grad()
    loss = PolicyLoss(FLAGS)
    parts = [backend.forward_backward(pack_micro_batch(batch, part, weights), loss) for part in rows]
    grads = [p.grad.clone() for p in backend.actor.model.parameters() if p.grad is not None]
    return merge(parts)["loss"].value, grads


@settings(max_examples=15, deadline=None)
@given(shape=groups, data=st.data(), masked=st.sampled_from([0.0, 0.4]))
def test_loss_and_gradient_are_equal_under_any_split_and_order(backend, shape, data, masked):
    prompts, responses = zip(*shape, strict=True)
    batch = filled(random_batch(prompts=list(prompts), responses=list(responses), masked=masked))
    want_loss, want = step(backend, batch, [np.arange(len(batch))])
    order = data.draw(st.permutations(range(len(batch))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(batch) - 1, 1)), max_size=3)))
    splits = [part for part in np.split(np.array(order), cuts) if len(part)]
    loss, grads = step(backend, batch, splits, share_prompts=data.draw(st.booleans()))
    assert loss == pytest.approx(want_loss, rel=1e-6, abs=1e-9)
    for got, other in zip(grads, want, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-8, atol=1e-10)


def test_the_gradient_of_a_step_is_its_derivative(backend):
    batch = filled(random_batch(prompts=[4, 7], responses=[[5, 3], [6, 2, 9]], masked=0.2))
    splits = [[0, 2, 4], [1, 3]]
    _, grads = step(backend, batch, splits)
    parameters = [p for p in backend.actor.model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(1)
    eps = 1e-6
    for _ in range(3):
        direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]

        def at(offset, direction=direction):
            before = [p.detach().clone() for p in parameters]
            with torch.no_grad():
                for p, d in zip(parameters, direction, strict=True):
                    p.add_(d, alpha=offset)
            loss, _ = step(backend, batch, splits)
            with torch.no_grad():
                for p, old in zip(parameters, before, strict=True):
                    p.copy_(old)
            return loss

        numeric = (at(eps) - at(-eps)) / (2 * eps)
        exact = float(sum((g * d).sum() for g, d in zip(grads, direction, strict=True)))
        assert numeric == pytest.approx(exact, rel=1e-5, abs=1e-8)


@settings(max_examples=40, deadline=None)
@given(shape=groups, share=st.booleans())
def test_a_layout_computes_every_token_once_and_shows_each_sequence_its_own(shape, share):
    prompts, responses = zip(*shape, strict=True)
    batch = random_batch(prompts=list(prompts), responses=list(responses))
    micro = pack_micro_batch(batch, range(len(batch)))
    layout = plan_layout(micro, share_prompts=share)
    tokens_T = micro.tokens_T
    run_U = torch.arange(len(tokens_T)) if layout.run_U is None else layout.run_U
    tokens_U, positions_U = tokens_T[run_U], micro.position_ids_T[run_U]
    assert torch.equal(tokens_U[layout.predict_R], tokens_T[micro.response_pos_R - 1])
    spread_P = torch.arange(len(run_U)) if layout.spread_P is None else layout.spread_P
    collect_U = torch.arange(len(run_U)) if layout.collect_U is None else layout.collect_U
    assert torch.equal(spread_P[collect_U], torch.arange(len(run_U)))
    seen = []
    start = 0
    for count, width in layout.buckets:
        for _ in range(count):
            row = spread_P[start : start + width]
            valid = positions_U[row] == torch.arange(width)
            length = width if bool(valid.all()) else int(valid.logical_not().nonzero()[0])
            seen.append(tuple(tokens_U[row[:length]].tolist()))
            start += width
    cu = micro.cu_seqlens_S1.tolist()
    unread = int(layout.run_U is not None)  # shared prompts drop the last token, which predicts nothing
    want = [tuple(tokens_T[a : b - unread].tolist()) for a, b in pairwise(cu)]
    assert len(seen) == len(want)
    assert all(any(s[: len(w)] == w for s in seen) for w in want)
