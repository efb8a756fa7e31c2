"""Numbers of slime's own functions on random inputs; needs a checkout: FURLONG_SLIME_DIR=DIR. Known differences are in
docs/reference/slime.md.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from furlong.algo.advantage import AdvantageInputs, penalized_advantages, return_advantages
from furlong.algo.log_ratio import importance_weights, kl_estimate, off_policy_mask, sequence_log_ratio
from furlong.algo.policy_loss import PolicyInputs, clipped_ratio_loss, clipped_weight_loss
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.core.sample import Sample
from furlong.slime_api import rewards
from furlong.training.optimizer import Schedule

SLIME = os.environ.get("FURLONG_SLIME_DIR")
CASES = 400

pytestmark = pytest.mark.skipif(SLIME is None, reason="needs a checkout of slime: set FURLONG_SLIME_DIR")


def module_of(path, **stubs):
    """Import one file of slime without its package; `stubs` replace modules that it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda *_, **__: lambda function: function)
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        spec = importlib.util.spec_from_file_location(f"of_slime_{Path(path).stem}", Path(str(SLIME)) / path)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ppo():
    return module_of("slime/utils/ppo_utils.py")


class Responses:
    """Random responses with masks, log-probs of two policies, and advantages, as lists and concatenated."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, 12, size=rng.integers(1, 6)).tolist()
        self.masks = [self._mask(rng, length) for length in self.lengths]
        scale = float(rng.choice([0.01, 0.3, 2.0]))
        self.old = [torch.tensor(-rng.exponential(1.0, n), dtype=torch.float32) for n in self.lengths]
        self.new = [old + torch.tensor(rng.normal(0, scale, len(old)), dtype=torch.float32) for old in self.old]
        self.advantages = [torch.full((n,), float(rng.normal()), dtype=torch.float32) for n in self.lengths]
        self.mask_R = torch.cat(self.masks)
        self.log_ratio_R = torch.cat(self.new) - torch.cat(self.old)
        self.seq_of_R = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        self.rewards = torch.tensor(rng.normal(size=len(self.lengths)), dtype=torch.float32)

    @staticmethod
    def _mask(rng, length):
        mask = torch.tensor(rng.random(length) < 0.7, dtype=torch.float32)
        mask[rng.integers(length)] = 1.0
        return mask

    def equal(self, ours, theirs, **tolerance):
        keep = self.mask_R > 0
        torch.testing.assert_close(ours[keep], theirs[keep], **{"rtol": 1e-5, "atol": 1e-6} | tolerance)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_estimates(ppo, kind, unbiased):
    for seed in range(CASES):
        case = Responses(seed)
        ratio = case.log_ratio_R.exp() if unbiased else None
        new, old = torch.cat(case.new), torch.cat(case.old)
        theirs = ppo.compute_approx_kl(new, old, kind, ratio)
        case.equal(kl_estimate(new, old, kind, ratio_R=ratio), theirs, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(("dual", "loss"), [(None, "ppo"), (3.0, "ppo"), (None, "cispo")])
def test_policy_losses_and_their_gradients(ppo, dual, loss):
    for seed in range(CASES):
        case = Responses(seed)
        keep = case.mask_R > 0
        results = []
        for is_ours in (True, False):
            new = torch.cat(case.new).requires_grad_()
            log_ratio = torch.where(keep, new - torch.cat(case.old), 0.0)
            advantages = torch.cat(case.advantages)
            if is_ours:
                kept = torch.where(keep, new, 0.0)
                inputs = PolicyInputs(log_ratio, kept, advantages, 0.2, 0.28, dual)
                terms = (clipped_ratio_loss if loss == "ppo" else clipped_weight_loss)(inputs)
                value, clipped = terms.loss_R, terms.clipped_R
            elif loss == "ppo":
                value, clipped = ppo.compute_policy_loss(-log_ratio, advantages, 0.2, 0.28, dual)
            else:
                value, clipped = ppo.compute_cispo_loss(-log_ratio, new, advantages, 0.2, 0.28)
            value[keep].sum().backward()
            results.append((value.detach(), new.grad, clipped))
        for ours, theirs in zip(*results, strict=True):
            case.equal(ours, theirs)


def test_gspo_and_off_policy_masks(ppo):
    for seed in range(CASES):
        case = Responses(seed)
        sizes = (case.mask_R, case.seq_of_R, len(case.lengths))
        theirs = -ppo.compute_gspo_kl(case.new, case.old, case.new, case.masks)
        masked = torch.where(case.mask_R > 0, case.log_ratio_R, 0.0)
        case.equal(sequence_log_ratio(masked, *sizes), theirs)
        args = SimpleNamespace(opsm_delta=0.05)
        theirs, _ = ppo.compute_opsm_mask(args, case.new, case.old, case.advantages, case.masks)
        case.equal(1 - off_policy_mask(masked, torch.cat(case.advantages), *sizes, delta=0.05), theirs)


def test_returns_of_reinforce_plus_plus(ppo, monkeypatch):
    parallel = SimpleNamespace(mpu=SimpleNamespace(get_context_parallel_world_size=lambda: 1))
    monkeypatch.setitem(sys.modules, "megatron.core", parallel)
    for seed in range(CASES):
        case = Responses(seed)
        gamma, coef = (1.0, 0.1) if seed % 2 else (0.95, 0.0)
        kl = [(new - old).abs() for new, old in zip(case.new, case.old, strict=True)]
        inputs = AdvantageInputs(case.rewards, case.mask_R, case.seq_of_R, torch.cat(kl), coef, gamma)
        lengths = (case.masks, case.lengths, case.lengths)
        theirs = ppo.get_reinforce_plus_plus_returns(case.rewards, kl, *lengths, coef, gamma)
        case.equal(return_advantages(inputs).float(), torch.cat(theirs), rtol=1e-4, atol=1e-5)
        theirs = ppo.get_reinforce_plus_plus_baseline_advantages(case.rewards, kl, case.masks, coef)
        case.equal(penalized_advantages(inputs), torch.cat(theirs))


def test_truncated_importance_weights():
    for seed in range(CASES):
        case = Responses(seed)
        flags = AlgoFlags(use_tis=True, tis_mode=("clip", "mask")[seed % 2], tis_clip=1.5, tis_clip_low=0.5)
        sizes = (case.mask_R, case.seq_of_R, len(case.lengths))
        ours, _ = importance_weights(flags, torch.cat(case.new), torch.cat(case.old), *sizes)
        ratio = case.log_ratio_R.exp()
        is_inside = (ratio >= 0.5) & (ratio <= 1.5)
        case.equal(ours, torch.where(is_inside, ratio, 0.0) if seed % 2 else ratio.clamp(0.5, 1.5))


WSD = ["exponential", "linear", "cosine", "minus_sqrt"]  # styles of its decay


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_learning_rates_of_megatron(style):
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    rng = random.Random(style)
    for _ in range(CASES):
        samples, steps = rng.choice([1, 8, 32]), rng.randint(2, 40)
        warmup = rng.randint(1, steps - 1)
        values = {"init_lr": 0.0, "max_lr": rng.uniform(1e-6, 1e-3), "min_lr": rng.choice([0.0, 1e-7])}
        optimizer = SimpleNamespace(param_groups=[{}])
        last, wsd_style = rng.randint(1, steps - warmup), rng.choice(WSD)
        theirs = scheduler(
            optimizer, lr_warmup_steps=warmup * samples, lr_decay_steps=steps * samples, lr_decay_style=style,
            start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant", wsd_decay_steps=last * samples,
            lr_wsd_decay_style=wsd_style, **values,
        )  # fmt: skip
        flags = OptimFlags(
            lr=values["max_lr"], min_lr=values["min_lr"], lr_decay_style=style, lr_warmup_iters=warmup,
            lr_decay_iters=steps, lr_wsd_decay_iters=last, lr_wsd_decay_style=wsd_style,
        )  # fmt: skip
        ours = Schedule(flags, total_steps=steps, samples_per_step=samples)
        for step in range(steps + 3):
            theirs.num_steps = step * samples
            assert ours.lr(step) == pytest.approx(theirs.get_lr({}), rel=1e-9, abs=1e-15)


def random_answer(rng):
    number = rng.choice([rng.randint(-50, 50), round(rng.uniform(-9, 9), 2)])
    a, b = rng.randint(1, 9), rng.randint(2, 9)
    forms = (f"{number}", rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}", rf"{a}\sqrt{{{b}}}", f"({a}, {b})", f"x^{b}+{a}")
    return rng.choice(forms)


def boxed(rng, answer):
    return f"so the answer is {rng.choice(['', 'clearly '])}\\boxed{{{answer}}}."


class PlainText:
    """A stand-in of pylatexenc's converter, which need not be installed: LaTeX stays as it is."""

    def latex_to_text(self, text):
        return text


@pytest.mark.parametrize("name", ["math", "deepscaler"])
def test_verifiers_of_mathematics_agree_where_texts_decide(name):
    """Equal texts are right for both; a pair that slime calls right is right here."""
    latex = SimpleNamespace(latex2text=SimpleNamespace(LatexNodes2Text=PlainText))  # fewer texts are equal with it
    utils = module_of("slime/rollout/rm_hub/math_utils.py", pylatexenc=latex)
    rng = random.Random(0)
    for _ in range(CASES):
        truth = random_answer(rng)
        given = truth if rng.random() < 0.5 else random_answer(rng)
        text = boxed(rng, given)
        theirs = bool(utils.grade_answer_verl(text, truth))
        if name == "math":
            ours = rewards.grade_answer_verl(text, truth)
        else:
            ours = rewards.deepscaler_reward(f"<think>hm</think>{text}", truth) == 1.0
        assert ours or not theirs, (given, truth)
        assert ours or given != truth, (given, truth)


def test_scores_of_dapo():
    theirs = module_of("slime/rollout/rm_hub/math_dapo_utils.py")
    rng = random.Random(1)
    for _ in range(CASES):
        truth = str(rng.randint(-99, 999))
        given = truth if rng.random() < 0.5 else str(rng.randint(-99, 999))
        strict = rng.random() < 0.5
        text = boxed(rng, given) if strict or rng.random() < 0.3 else f"I think.\nAnswer: {given}"
        expected = theirs.compute_score(text, truth, strict_box_verify=strict)
        ours = rewards.dapo_compute_score(text, truth, strict_box_verify=strict)
        assert ours["score"] == expected["score"], (text, truth, ours, expected)
        assert ours["acc"] == expected["acc"]


def test_scores_of_f1():
    theirs = module_of("slime/rollout/rm_hub/f1.py")
    rng = random.Random(2)
    words = ["The", "cat", "a", "dog,", "yes", "no", "noanswer", "42", "sat", "An"]
    for _ in range(CASES):
        given, truth = (" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(2))
        if not set(truth.lower().replace(",", "").split()) - {"a", "an", "the"}:
            continue  # a label of articles alone can be matched here
        assert rewards.f1_scores(given, truth) == pytest.approx(theirs.f1_score(given, truth)), (given, truth)


def test_scores_of_gpqa():
    theirs = module_of("slime/rollout/rm_hub/gpqa.py")
    rng = random.Random(3)
    patterns = (
        "answer: {}",
        "The answer is {}.",
        "<think>A or B</think>\nAnswer: {}",
        "{}",
    )
    for _ in range(CASES):
        label, given = rng.choice("ABCD"), rng.choice("ABCD")
        text = rng.choice(patterns).format(given)
        assert rewards.gpqa_reward(text, label) == theirs.compute_gpqa_reward(text, label), (text, label)


def test_responses_built_token_by_token():
    misc = SimpleNamespace(decode_int32_meta_array=lambda *_: None)
    types = module_of("slime/utils/types.py", **{"slime": ModuleType("slime"), "slime.utils.misc": misc})
    rng = random.Random(4)
    args = SimpleNamespace(sglang_speculative_algorithm=None, use_rollout_routing_replay=False)
    for _ in range(CASES):
        ours, theirs = Sample(prompt="p", tokens=[1, 2]), types.Sample(prompt="p", tokens=[1, 2])
        for _ in range(rng.randint(1, 4)):
            tokens = [rng.randint(3, 90) for _ in range(rng.randint(1, 5))]
            is_trained = rng.random() < 0.6
            log_probs = [-rng.random() for _ in tokens] if is_trained else None
            finish = {"type": rng.choice(["stop", "length", "abort"])}
            meta = {"finish_reason": finish, "weight_version": "3", "output_token_logprobs": []} if is_trained else None
            for sample in (ours, theirs):
                sample.append_response_tokens(
                    args, tokens=tokens, log_probs=log_probs, trainable=is_trained, meta_info=meta
                )
        for name in ("tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert str(ours.status.value) == str(theirs.status.value)
