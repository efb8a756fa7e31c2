"""Monitors of numbers: log-probs of engine, trainer and reference, and the gradient."""

from __future__ import annotations

import statistics

from furlong.core.catalogue import diagnosis
from furlong.diagnosis.monitors.monitor import Found, Now, Row
from furlong.diagnosis.monitors.run_facts import Setting

GAP = "train/train_rollout_logprob_abs_diff"
# KL to a reference of the same weights: kernels explain less than 1e-4, nothing but a wrong setting more than 1 (the
# debugging guides of slime and Miles).
KL_JITTER, KL_WRONG = 1e-4, 1.0
# Mean |log-prob of trainer - of engine| a token. Miles' own check of rollout 0 allows 0.03, slime's 0.1. Equal
# precisions of furlong's own engine and trainer measure 1e-7 (float32) and at most 7e-3 (bfloat16).
GAP_WARNING, GAP_ERROR = 0.03, 0.1
# The same on tokens of an older policy, over so many steps: how far the policy has moved since. The quickstart's model
# in 40 rollouts with 1 to 5 of them ahead: below 0.1 it learned as in a synchronous run, from 0.2 on less or nothing.
DRIFT, DRIFT_ROWS = 0.2, 8
# Mean log-prob of a model's own answers at which the guides suspect the chat template of an instruct model.
LIKELY = -0.8
UNTRAINED = -2.5  # below it no template alone explains the answers: chance is -ln(vocabulary)
# A ratio to the old policy where there is none: miles asserts 1e-9, bfloat16 passes that run twice differ by 1e-3.
PPO_KL = 1e-2
# Gradient norms before clipping. Of 17 CPU settings the first was at most 9; in 40 rollouts of the quickstart none was
# above 1.6 times the median of those before it.
FIRST_GRAD_NORM = 100.0
GRAD_JUMP = 20.0
GRAD_ROWS, GRAD_LEAST = 32, 8
WIDE_REWARDS = 20.0  # largest less smallest; of rewards from 0 to 1 the first gradient was at most 9
# Share of the engine's choices of experts that are the trainer's, too; kernels alone leave above 0.95.
ROUTING = 0.9


def policy_against_reference(now: Now) -> Found | None:
    """NUM01: KL to the reference before the first optimizer step."""
    kl = _first_kl(now)
    if kl is None or kl <= KL_JITTER:
        return None
    setting = now.setting
    where = f"policy {setting.model}, reference {setting.reference}"
    severity = "error" if kl > KL_WRONG else "warning" if setting.is_own_reference else "info"
    cause = remedy = None
    if not setting.is_own_reference:
        cause = f"--ref-load {setting.reference} is another model than --hf-checkpoint {setting.model}."
        remedy = "check --ref-load, or leave it out: the reference is then --hf-checkpoint; if it is meant, go on"
    return Found(
        diagnosis(
            "NUM01",
            f"step {now.step}: KL of the policy to the reference is {kl:.3g} before any training ({where})",
            cause=cause,
            remedy=remedy or _ways_to_equal_kernels(setting),
            severity=severity,
            evidence={"step": now.step, "kl": kl, "model": setting.model, "reference": setting.reference},
        ),
        kl,
    )


def _ways_to_equal_kernels(setting: Setting) -> str:
    """What brings two passes over the same weights together, as far as this run can take it."""
    ways = [
        "--attention-backend flash" if setting.backend == "megatron" else "",
        "" if setting.is_float32 else "--fp32, where the run computes in bfloat16",
    ]
    return "; ".join(["look at the samples of this step (--save-debug-train-data)", *filter(None, ways)])


def _first_kl(now: Now) -> float | None:
    """KL to the reference measured with the weights that the run starts from; None if nothing measured it."""
    if not now.is_first:
        return None
    if (kl := now.row.get("selftest/ref_kl")) is not None:
        return kl
    if (kl := now.row.get("rollout/kl")) is not None:
        return abs(kl)
    if now.setting.steps_per_rollout == 1 and (kl := now.row.get("train/kl_loss")) is not None:
        return abs(kl)
    return None


def trainer_against_engine(now: Now) -> Found | None:
    """NUM02: log-probs of the same tokens and weights in engine and trainer."""
    gap = now.row.get(GAP)
    if gap is None or gap <= GAP_WARNING or _is_stale(now.row) or not _says_gap(now):
        return None
    shares = {
        name.removeprefix("selftest/share/"): value
        for name, value in now.row.items()
        if name.startswith("selftest/share/") and value > 0
    }
    largest = now.row.get("selftest/logp_max_diff")
    parts = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in sorted(shares.items(), key=_second))
    return Found(
        diagnosis(
            "NUM02",
            f"step {now.step}: log-probs of engine and trainer differ by {gap:.3g} per token on tokens of the "
            f"same weights (below {GAP_WARNING} is usual"
            + ("" if largest is None else f"; forward_logp_max_diff {largest:.3g}")
            + (f"); by cause: {parts}" if parts else ")"),
            remedy=_remedy_of_gap(shares),
            severity="error" if gap > GAP_ERROR else "warning",
            evidence={"step": now.step, "mean_abs_diff": gap, "shares": shares}
            | {name: now.row[name] for name in ("selftest/logp_max_diff", "selftest/logp_p99_diff") if name in now.row},
        ),
        gap,
    )


def policy_against_older_ones(now: Now) -> Found | None:
    """ASYNC01: samples are as old as the flags allow, and the policy has moved far from those that sampled them."""
    setting = now.setting
    rows = [*now.history, now.row]
    stale = rows[-DRIFT_ROWS:]
    if len(stale) < DRIFT_ROWS or not all(_is_stale(row) and GAP in row for row in stale) or not _says_gap(now):
        return None
    gap = sum(row[GAP] for row in stale) / DRIFT_ROWS
    fresh = max((row[GAP] for row in rows if GAP in row and not _is_stale(row)), default=0.0)
    if gap - fresh < DRIFT:
        return None
    age = now.row.get("rollout/staleness/mean", 0.0)
    between = f"; engine and trainer differ by {fresh:.2g} on fresh ones" if fresh > GAP_WARNING else ""
    ways = [
        f"a lower --async-buffer-size (it is {setting.rollouts_ahead})" if setting.rollouts_ahead else "",
        f"--update-weights-interval 1 (it is {setting.publishes_every})" if setting.publishes_every > 1 else "",
        "--mask-offpolicy-in-partial-rollout" if setting.is_partial else "",
        "a lower --lr",
        "--use-tis, which corrects a part of it" if setting.may_use_tis else "",
    ]
    return Found(
        diagnosis(
            "ASYNC01",
            f"step {now.step}: samples are {age:.2g} rollouts old on average, as the flags allow, and meanwhile the "
            f"policy moves by {gap:.2g} a token in log-prob (over {DRIFT_ROWS} steps; 0.1 does little harm{between})",
            cause="It is trained on answers that it would not give any more.",
            remedy="; ".join(filter(None, ways)),
            evidence={"step": now.step, "mean_abs_diff": gap, "fresh": fresh, "mean": age},
        ),
        gap,
        "drift",
    )


def _is_stale(row: Row) -> bool:
    return row.get("rollout/staleness/max", 0.0) > 0


def _says_gap(now: Now) -> bool:
    """Whether the gap of log-probs is one of two policies on tokens that one of them sampled."""
    if now.setting.loss_type == "sft_loss" or now.has_foreign_tokens:
        return False  # an engine never said how likely foreign tokens are: TOOL01
    # Else it is measured along the steps of the rollout, which move the policy.
    return not (now.setting.has_old_policy and now.setting.steps_per_rollout > 1)


def _second(item: tuple[str, float]) -> float:
    return -item[1]


def _remedy_of_gap(shares: dict[str, float]) -> str:
    if not shares:
        return (
            "look for the cause with --debug-determinism and --check-weight-update-equal; --use-tis corrects the rest"
        )
    return {
        "stale_version": "publish after every rollout (--update-weights-interval 1); engines must report versions",
        "sampling_transform": "engine and trainer must use one --rollout-temperature; the engine has to report "
        "log-probs before top-p and top-k, as SGLang does",
        "retokenisation": "keep the engine's token ids (append_response_tokens) in place of encoding its text again",
        "flat": "the engine's log-probs are the same for every token: if a function of yours fills them in, keep the "
        "engine's; if they are those of chance, -ln of the vocabulary's size, nothing came to its output layer "
        "(--check-weight-update-equal, and SYNC04 of docs/troubleshooting.md)",
        "routing": "give --use-rollout-routing-replay, or correct with --use-tis",
        "numerics": "use one precision in engine and trainer (--embedded-dtype auto), or correct with --use-tis",
    }[max(shares, key=lambda name: shares[name])]


def own_answers(now: Now) -> Found | None:
    """TPL03: an instruct model that finds its own answers unlikely."""
    setting = now.setting
    log_prob = now.row.get("rollout/log_probs")
    if not now.is_first or log_prob is None or log_prob > LIKELY or now.has_foreign_tokens:
        return None
    if setting.loss_type != "policy_loss" or not setting.has_chat_template or setting.temperature > 1:
        return None
    way = (
        "run `furlong doctor` with the same flags: it compares the prompts with the template (TPL01, TPL02), as does "
        "`furlong template check`"
    )
    cause = None
    if log_prob < UNTRAINED:
        cause = "A model that was not trained at all, or whose weights were not loaded, is about as unsure as this."
        way = "check --hf-checkpoint (`furlong check DIR` reads its tensors); then " + way
    elif not setting.applies_chat_template:
        way = "add --apply-chat-template if the prompts are plain questions or messages; " + way
    return Found(
        diagnosis(
            "TPL03",
            f"step {now.step}: the trainer's mean log-prob of the first responses is {log_prob:.3f} per token "
            f"(an instruct model in its own format is above {LIKELY})",
            cause=cause,
            remedy=way,
            evidence={
                "step": now.step,
                "log_prob": log_prob,
                "apply_chat_template": setting.applies_chat_template,
            },
        )
    )


def gradient(now: Now) -> Found | None:
    """NUM03: a gradient far above those before it, or a policy that left itself within one step."""
    setting = now.setting
    ppo_kl = now.row.get("train/ppo_kl")
    if setting.steps_per_rollout == 1 and not setting.has_old_policy and ppo_kl is not None and abs(ppo_kl) > PPO_KL:
        return _large(
            now, "train/ppo_kl", abs(ppo_kl), "is not 0 although there is one optimizer step per rollout", abs(ppo_kl)
        )
    norm = now.row.get("train/grad_norm")
    if norm is None:
        return None
    if now.is_first and norm > FIRST_GRAD_NORM:
        return _large(now, "train/grad_norm", norm, f"at the first step, {FIRST_GRAD_NORM:g} is a lot", norm)
    before = [value for value in now.recent("train/grad_norm", GRAD_ROWS + 1)[:-1] if value > 0]
    if len(before) < GRAD_LEAST:
        return None
    usual = statistics.median(before)
    if norm <= GRAD_JUMP * max(usual, statistics.fmean(before)):
        return None
    return _large(now, "train/grad_norm", norm, f"{norm / usual:.0f} times the median of the steps before", norm)


def _large(now: Now, name: str, value: float, why: str, level: float) -> Found:
    cause, remedy = _why_large(now, name)
    return Found(
        diagnosis(
            "NUM03",
            f"step {now.step}: {name} {value:.4g}, {why}",
            cause=cause,
            remedy=remedy,
            evidence={"step": now.step, "metric": name, "value": value, "before": now.recent(name, 9)[:-1]},
        ),
        level,
        name,
    )


def _why_large(now: Now, name: str) -> tuple[str | None, str]:
    """The cause (None: the row's) and the way out: rewards in thousands, a policy that moved, or what is trained on."""
    setting, spread = now.setting, now.row.get("rollout/reward_range", 0.0)
    if name == "train/grad_norm" and not setting.normalizes_spread and spread > WIDE_REWARDS:
        return (
            f"Rewards spread over {spread:.4g}, and the gradient grows with them: nothing divides by their deviation.",
            "scale the reward to about 0 to 1, or leave out --disable-grpo-std-normalization; --clip-grad bounds each "
            "step meanwhile",
        )
    look = (
        "look at the samples of this step (--save-debug-rollout-data), at their template (`furlong template check`) "
        "and at --label-key"
    )
    if name == "train/ppo_kl":
        return "Two passes over the same weights differ: kernels, or a split over ranks.", f"{look}; --fp32"
    if now.is_first:
        return "Data or template do not fit the model, or the reward reads a wrong key.", f"{look}"
    return None, f"{look}; lower --lr, and --clip-grad bounds each step"


def expert_routing(now: Now) -> Found | None:
    """NUM05: experts chosen by the trainer against those that the engine chose."""
    agreement = now.row.get("train/routing_agreement")
    if agreement is None or agreement >= ROUTING or now.setting.replays_routing:
        return None
    return Found(
        diagnosis(
            "NUM05",
            f"step {now.step}: of the experts that the engine chose for the trained tokens, the trainer chose "
            f"{agreement:.1%}, too",
            remedy="give --use-rollout-routing-replay; if a few tokens in ten differ from the first step on, look at "
            "the weights of the routers on both sides first",
            evidence={"step": now.step, "agreement": agreement},
        ),
        1 - agreement,
    )
