"""The KL to a teacher: its value and gradient against plain autograd, and what it must be exactly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name

from furlong.algo.advantage import token_advantages
from furlong.algo.distillation import TeacherHead, target_stats, top_k_kl
from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags, OpdFlags
from furlong.core.batch import pack_micro_batch
from furlong.interfaces import TokenStats
from models_zoo import random_batch

R, V, D = 12, 20, 8
OPTIONS = {"temperature": 0.7, "chunk_size": 5, "entropy": True, "entropy_grad": True}


def drawn(seed: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return normal(R, D).requires_grad_(), normal(V, D).requires_grad_(), normal(V).requires_grad_()


def teacher(seed: int = 1, dtype: torch.dtype = torch.float64) -> TeacherHead:
    return TeacherHead(*(each.detach() for each in drawn(seed, dtype)))


def plain(hidden, weight, bias, softcap=None):
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits / OPTIONS["temperature"], -1)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_values_and_gradients_are_those_of_autograd(softcap):
    targets = torch.randint(0, V, (R, 1))
    ids = torch.rand(R, V).topk(4).indices
    targets = torch.cat([targets, ids], 1)
    student, other = drawn(), teacher()
    found = target_stats(
        student[0], student[1], targets, bias_V=student[2], softcap=softcap, teacher=other, top_k=3, **OPTIONS
    )
    expected = [each.detach().clone().requires_grad_() for each in student]
    logp, logq = plain(*expected, softcap), plain(other.hidden_RD, other.weight_VD, other.bias_V, softcap)
    kl, entropy = (logp.exp() * (logp - logq)).sum(-1), -(logp.exp() * logp).sum(-1)
    assert torch.equal(found.top_ids_RK, logp.topk(3).indices)
    for have, want in ((found.log_probs_RM, logp.gather(1, targets)), (found.kl_R, kl), (found.entropy_R, entropy)):
        assert torch.allclose(have, want, atol=1e-12)
    factor = torch.linspace(-1, 2, R, dtype=torch.float64)
    mixed = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    (factor * (found.kl_R + 0.3 * found.entropy_R + found.log_probs_RM @ mixed)).sum().backward()
    (factor * (kl + 0.3 * entropy + logp.gather(1, targets) @ mixed)).sum().backward()
    for have, want in zip(student, expected, strict=True):
        assert torch.allclose(have.grad, want.grad, atol=1e-12)


def test_chunks_change_nothing():
    student, other, targets = drawn(), teacher(), torch.randint(0, V, (R, 3)).sort(1).values
    whole, chunked = (
        target_stats(student[0], student[1], targets, teacher=other, top_k=4, **(OPTIONS | {"chunk_size": size}))
        for size in (-1, 1)
    )
    for name in ("log_probs_RM", "kl_R", "entropy_R", "top_ids_RK"):
        assert torch.allclose(getattr(chunked, name), getattr(whole, name), atol=1e-12), name
    for have, want in zip(
        *(torch.autograd.grad(each.kl_R.sum(), student[:2]) for each in (chunked, whole)), strict=True
    ):
        assert torch.allclose(have, want, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_that_is_the_policy_gives_exactly_no_gradient(dtype):
    student = drawn(dtype=dtype)
    same = TeacherHead(student[0].detach(), student[1].detach())
    options = OPTIONS | {"entropy_grad": False}
    full = target_stats(student[0], student[1], torch.zeros(R, 1, dtype=torch.long), teacher=same, **options)
    assert torch.equal(full.kl_R, torch.zeros(R))
    ids = target_stats(student[0], student[1], torch.zeros(R, 1, dtype=torch.long), top_k=6, **options).top_ids_RK
    top = target_stats(student[0], student[1], torch.cat([ids[:, :1], ids], 1), **options)
    kl = top_k_kl(top.log_probs_RM[:, 1:], top.log_probs_RM[:, 1:].detach(), torch.ones(R, dtype=torch.bool))
    for value in (full.kl_R, kl):
        assert not any(g.any() for g in torch.autograd.grad(value.sum(), student[:2]))


def test_all_tokens_of_the_vocabulary_give_the_full_kl():
    student, other = drawn(), teacher()
    every = torch.arange(V).expand(R, V)
    top = target_stats(student[0], student[1], torch.cat([every[:, :1], every], 1), bias_V=student[2], **OPTIONS)
    logq = plain(other.hidden_RD, other.weight_VD, other.bias_V)
    by_tokens = top_k_kl(top.log_probs_RM[:, 1:], logq, torch.ones(R, dtype=torch.bool))
    full = target_stats(student[0], student[1], every[:, :1], bias_V=student[2], teacher=other, **OPTIONS).kl_R
    assert torch.allclose(by_tokens, full, atol=1e-12)
    for have, want in zip(*(torch.autograd.grad(kl.sum(), student) for kl in (by_tokens, full)), strict=True):
        assert torch.allclose(have, want, atol=1e-12)


def test_the_expected_gradient_of_each_loss_is_that_of_the_kl():
    """Over all tokens of a vocabulary of 20, weighted by their probability under the policy."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(V, generator=generator, dtype=torch.float64).requires_grad_()
    logp, logq = torch.log_softmax(logits, -1), torch.log_softmax(torch.randn(V, generator=generator).double(), -1)
    exact = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)[0]
    algo, ones = AlgoFlags(eps_clip=10.0), torch.ones(V)
    batch = random_batch(prompts=[1], responses=[[V]], vocab=V)
    micro = pack_micro_batch(batch, [0])
    old = logp.detach()
    columns = {"teacher_log_probs": logq, "teacher_top_log_probs": logq.expand(V, V)}
    found = {}
    for name in ("sampled", "topk", "full"):
        opd = OpdFlags(use_opd=True, opd_loss=name, opd_kl_coef=1.0)
        kl_R = old - logq if name == "sampled" else None
        advantages, _ = token_advantages(
            algo, rewards_S=torch.zeros(1), mask_R=ones, seq_of_R=torch.zeros(V, dtype=torch.long), opd=opd,
            opd_kl_R=kl_R,
        )  # fmt: skip
        given = micro.with_columns(advantages=advantages, opd_reverse_kl=old - logq, old_log_probs=old, **columns)
        object.__setattr__(given, "weight_R", old.exp())  # the probability of each token
        kl = (logp.exp() * (logp - logq)).sum().expand(V)
        stats = TokenStats(logp, top_log_probs_RK=logp.expand(V, V), teacher_kl_R=kl)
        loss, metrics = PolicyLoss(algo, opd=opd)(given, stats)
        found[name] = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert metrics["opd_reverse_kl"].value == pytest.approx(float(kl[0].detach()))
    for name, gradient in found.items():
        assert torch.allclose(gradient, exact, atol=1e-7), name


def test_a_term_of_the_top_k_kl_is_never_negative_and_masked_tokens_have_none():
    log_p, log_q = drawn(4)[0], drawn(5)[0].detach() * 3
    log_q[0, 0] = float("nan")
    kept = torch.tensor([False] + [True] * (R - 1))
    kl = top_k_kl(log_p, log_q, kept)
    assert kl[0] == 0
    assert (kl >= 0).all()
    assert not torch.autograd.grad(kl.sum(), log_p)[0][0].any()


def test_advantages_are_scaled_and_lowered_before_whitening():
    given = {
        "rewards_S": torch.tensor([1.0, -1.0]), "mask_R": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "seq_of_R": torch.tensor([0, 0, 0, 1]), "opd_kl_R": torch.tensor([0.5, -1.0, 0.0, 2.0]),
    }  # fmt: skip
    opd = OpdFlags(use_opd=True, opd_kl_coef=2.0, opd_task_reward_coef=3.0)
    advantages, _ = token_advantages(AlgoFlags(), **given, opd=opd)
    assert advantages.tolist() == [2.0, 5.0, 3.0, -7.0]
    whitened, _ = token_advantages(AlgoFlags(normalize_advantages=True), **given, opd=opd)
    assert whitened[[0, 1, 3]].mean() == pytest.approx(0, abs=1e-6)
    critic = {"values_R": torch.zeros(4), "opd": opd}
    _, returns = token_advantages(AlgoFlags(advantage_estimator="ppo"), **given, **critic)
    assert returns.tolist() == [1.0, 1.0, 0.0, -1.0]  # what a critic learns is the task's
