"""Monitors of numerics: log-probs of engine, trainer and reference, gradients, and expert routing."""

from __future__ import annotations

import statistics

from furlong.diagnosis.monitors.monitor import Alert, Row, RunFacts, StepContext

GAP = "train/train_rollout_logprob_abs_diff"
# KL to a reference with the same weights: kernels explain less than 1e-4; above 1 a setting is wrong (debugging guides
# of slime and Miles).
KL_JITTER, KL_WRONG = 1e-4, 1.0
# Mean |log-prob of trainer - of engine| per token. Miles checks rollout 0 against 0.03, slime against 0.1. With equal
# precision, furlong's own engine and trainer measure 1e-7 (float32) and at most 7e-3 (bfloat16).
GAP_WARNING, GAP_ERROR = 0.03, 0.1
# The same on tokens of an older policy, averaged over steps: how far the policy has moved since. The quickstart's model
# over 40 rollouts with 1 to 5 in flight: below 0.1 it learned as in a synchronous run, from 0.2 on less or not at all.
DRIFT, DRIFT_ROWS = 0.2, 8
# Mean log-prob of a model's own answers at which the guides suspect the chat template of an instruct model.
LIKELY = -0.8
UNTRAINED = -2.5  # below it a template alone is no explanation: chance is -ln(vocabulary)
# Log-ratio to the old policy before any update: Miles asserts 1e-9; repeated bfloat16 passes differ by 1e-3.
PPO_KL = 1e-2
# Gradient norms before clipping. The first was at most 9 in 17 CPU settings; in 40 rollouts of the quickstart none
# exceeded 1.6 times the median of the earlier ones.
FIRST_GRAD_NORM = 100.0
GRAD_JUMP = 20.0
GRAD_ROWS, GRAD_LEAST = 32, 8
WIDE_REWARDS = 20.0  # largest minus smallest; with rewards from 0 to 1 the first gradient norm was at most 9
# Share of the engine's expert choices that the trainer agrees with; kernels alone leave more than 0.95.
ROUTING = 0.9


def reference_kl(now: StepContext) -> Alert | None:
    """NUM01: KL to the reference before the first optimizer step."""
    kl = _first_kl(now)
    if kl is None or kl <= KL_JITTER:
        return None
    facts = now.facts
    is_warm_start = not facts.is_own_reference and facts.initial_weights != facts.model
    severity = "error" if kl > KL_WRONG else "warning" if facts.is_own_reference else "info"
    if is_warm_start:  # two models on purpose: their distance is no fault
        severity = "info"
    cause, remedy = None, _equal_kernels_remedy(facts)
    if not facts.is_own_reference:
        cause = f"--ref-load {facts.reference} is a different model from --hf-checkpoint {facts.model}."
        remedy = "check --ref-load, or remove it to use --hf-checkpoint as the reference; ignore this if intended"
    if is_warm_start:
        cause = f"Training starts from --load {facts.initial_weights}, which differs from the reference."
        remedy = f"none if the reference is intended; --ref-load {facts.initial_weights} compares with the start"
    return now.alert(
        "NUM01",
        f"KL from the policy to the reference is {kl:.3g} before any training "
        f"(policy {facts.initial_weights}, reference {facts.reference})",
        cause=cause,
        remedy=remedy,
        severity=severity,
        evidence={"kl": kl, "model": facts.initial_weights, "reference": facts.reference},
        level=kl,
    )


def _equal_kernels_remedy(facts: RunFacts) -> str:
    """Flags, among those that this run accepts, with which two passes over the same weights agree better."""
    train = facts.config.train
    flags = [
        "try --attention-backend flash" if train.train_backend == "megatron" else "",
        "" if train.fp32 else "try --fp32 if the run computes in bfloat16",
    ]
    return "; ".join(["inspect this step's samples (--save-debug-train-data)", *filter(None, flags)])


def _first_kl(now: StepContext) -> float | None:
    """Return the KL to the reference with the initial weights; None if it was not measured."""
    if not now.is_first:
        return None
    if (kl := now.row.get("selftest/ref_kl")) is not None:
        return kl
    if (kl := now.row.get("rollout/kl")) is not None:
        return abs(kl)
    if now.facts.steps_per_rollout == 1 and (kl := now.row.get("train/kl_loss")) is not None:
        return abs(kl)
    return None


def engine_mismatch(now: StepContext) -> Alert | None:
    """NUM02: log-probs of engine and trainer for the same tokens and weights."""
    gap = now.row.get(GAP)
    if gap is None or gap <= GAP_WARNING or _is_stale(now.row) or not _is_gap_meaningful(now):
        return None
    shares = {
        name.removeprefix("selftest/share/"): value
        for name, value in now.row.items()
        if name.startswith("selftest/share/") and value > 0
    }
    largest = now.row.get("selftest/logp_max_diff")
    by_size = sorted(shares.items(), key=lambda item: -item[1])
    causes = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in by_size)
    return now.alert(
        "NUM02",
        f"log-probs of engine and trainer differ by {gap:.3g} per token for the same weights "
        f"(normal: below {GAP_WARNING}"
        + ("" if largest is None else f"; forward_logp_max_diff {largest:.3g}")
        + (f"); by cause: {causes}" if causes else ")"),
        remedy=_mismatch_remedy(shares),
        severity="error" if gap > GAP_ERROR else "warning",
        evidence={"mean_abs_diff": gap, "shares": shares}
        | {name: now.row[name] for name in ("selftest/logp_max_diff", "selftest/logp_p99_diff") if name in now.row},
        level=gap,
    )


def policy_drift(now: StepContext) -> Alert | None:
    """ASYNC01: samples are within the staleness bound, but the policy has moved far from the one that sampled them."""
    rows = [*now.history, now.row]
    stale = rows[-DRIFT_ROWS:]
    if len(stale) < DRIFT_ROWS or not all(_is_stale(row) and GAP in row for row in stale):
        return None
    if not _is_gap_meaningful(now):
        return None
    gap = sum(row[GAP] for row in stale) / DRIFT_ROWS
    fresh = max((row[GAP] for row in rows if GAP in row and not _is_stale(row)), default=0.0)
    if gap - fresh < DRIFT:
        return None
    age = now.row.get("rollout/staleness/mean", 0.0)
    mismatch = f"; engine and trainer differ by {fresh:.2g} on fresh samples" if fresh > GAP_WARNING else ""
    rollout, sync, algo = now.facts.config.rollout, now.facts.config.sync, now.facts.config.algo
    ahead, interval = rollout.async_buffer_size or 0, sync.update_weights_interval
    flags = [
        f"lower --async-buffer-size (now {ahead})" if ahead else "",
        f"set --update-weights-interval 1 (now {interval})" if interval > 1 else "",
        "add --mask-offpolicy-in-partial-rollout" if rollout.partial_rollout else "",
        "lower --lr",
        "" if algo.use_tis or algo.use_rollout_logprobs else "add --use-tis, which corrects part of the drift",
    ]
    return now.alert(
        "ASYNC01",
        f"samples are {age:.2g} rollouts old on average, as the flags allow, and the policy has "
        f"moved by {gap:.2g} in log-prob per token since (over {DRIFT_ROWS} steps; 0.1 is mostly harmless"
        f"{mismatch})",
        cause="Training uses answers that the current policy would hardly give.",
        remedy="; ".join(filter(None, flags)),
        evidence={"mean_abs_diff": gap, "fresh": fresh, "mean": age},
        level=gap,
        kind="drift",
    )


def _is_stale(row: Row) -> bool:
    return row.get("rollout/staleness/max", 0.0) > 0


def _is_gap_meaningful(now: StepContext) -> bool:
    """Whether the log-prob gap compares two policies on tokens that one of them sampled."""
    if now.facts.config.algo.loss_type == "sft_loss" or now.trains_foreign_tokens:
        return False  # the engine has no log-probs of tokens that it did not sample: TOOL01
    # With several optimizer steps per rollout, the gap to an old policy includes their updates.
    return not (now.facts.has_old_policy and now.facts.steps_per_rollout > 1)


MISMATCH_REMEDIES = {
    "stale_version": "update weights after every rollout (--update-weights-interval 1); engines must report versions",
    "sampling_transform": "use the same --rollout-temperature in engine and trainer; the engine must report log-probs "
    "from before top-p and top-k, as SGLang does",
    "retokenisation": "keep the engine's token ids (append_response_tokens) instead of encoding its text again",
    "flat": "every token has the same log-prob in the engine: if your function fills them in, keep the engine's; if "
    "they are chance, -ln(vocabulary size), the engine's output layer got no weights (--check-weight-update-equal, "
    "and SYNC04 in docs/troubleshooting.md)",
    "routing": "add --use-rollout-routing-replay, or correct the mismatch with --use-tis",
    "numerics": "use the same precision in engine and trainer (--embedded-dtype auto), or correct with --use-tis",
}


def _mismatch_remedy(shares: dict[str, float]) -> str:
    if not shares:
        return "find the cause with --debug-determinism and --check-weight-update-equal; --use-tis corrects the rest"
    return MISMATCH_REMEDIES[max(shares, key=lambda name: shares[name])]


def unlikely_responses(now: StepContext) -> Alert | None:
    """TPL03: an instruct model assigns low probability to its own responses."""
    config = now.facts.config
    log_prob = now.row.get("rollout/log_probs")
    if not now.is_first or log_prob is None or log_prob > LIKELY or now.trains_foreign_tokens:
        return None
    if config.algo.loss_type != "policy_loss" or not now.facts.has_chat_template:
        return None
    if config.rollout.rollout_temperature > 1:
        return None
    cause, remedy = (
        None,
        "run `furlong doctor` with the same flags, which compares the prompts with the template (TPL01, TPL02), as "
        "`furlong template check` does",
    )
    if log_prob < UNTRAINED:
        cause = "The model is untrained, or its weights were not loaded."
        remedy = f"check --hf-checkpoint (`furlong check DIR` reads its tensors); then {remedy}"
    elif not config.data.apply_chat_template:
        remedy = f"add --apply-chat-template if the prompts are plain questions or messages; {remedy}"
    return now.alert(
        "TPL03",
        f"the trainer's mean log-prob of the first responses is {log_prob:.3f} per token "
        f"(an instruct model in its own format is above {LIKELY})",
        cause=cause,
        remedy=remedy,
        evidence={
            "log_prob": log_prob,
            "apply_chat_template": config.data.apply_chat_template,
        },
    )


def gradient(now: StepContext) -> Alert | None:
    """NUM03: a gradient norm far above the earlier ones, or a policy that changed before any optimizer step."""
    facts = now.facts
    ppo_kl = now.row.get("train/ppo_kl")
    if facts.steps_per_rollout == 1 and not facts.has_old_policy and ppo_kl is not None and abs(ppo_kl) > PPO_KL:
        return _gradient_alert(now, "train/ppo_kl", abs(ppo_kl), "must be 0 with one optimizer step per rollout")
    norm = now.row.get("train/grad_norm")
    if norm is None:
        return None
    if now.is_first and norm > FIRST_GRAD_NORM:
        return _gradient_alert(now, "train/grad_norm", norm, f"above {FIRST_GRAD_NORM:g} in the first step")
    before = [value for value in now.recent("train/grad_norm", GRAD_ROWS + 1)[:-1] if value > 0]
    if len(before) < GRAD_LEAST:
        return None
    usual = statistics.median(before)
    if norm <= GRAD_JUMP * max(usual, statistics.fmean(before)):
        return None
    return _gradient_alert(now, "train/grad_norm", norm, f"{norm / usual:.0f} times the median of the earlier steps")


def _gradient_alert(now: StepContext, name: str, value: float, excess: str) -> Alert:
    cause, remedy = _gradient_cause(now, name)
    return now.alert(
        "NUM03",
        f"{name} is {value:.4g}, {excess}",
        cause=cause,
        remedy=remedy,
        evidence={"metric": name, "value": value, "before": now.recent(name, 9)[:-1]},
        level=value,
        kind=name,
    )


def _gradient_cause(now: StepContext, name: str) -> tuple[str | None, str]:
    """Return the cause (None: the catalogue's) and the remedy."""
    spread = now.row.get("rollout/reward_range", 0.0)
    if name == "train/grad_norm" and not now.facts.normalizes_spread and spread > WIDE_REWARDS:
        return (
            f"Rewards spread over {spread:.4g} and are not divided by their standard deviation, so the gradient grows "
            "with them.",
            "scale rewards to about 0 to 1, or remove --disable-grpo-std-normalization; --clip-grad limits each step "
            "until then",
        )
    inspect = (
        "inspect this step's samples (--save-debug-rollout-data), their template (`furlong template check`) and "
        "--label-key"
    )
    if name == "train/ppo_kl":
        return "Two passes over the same weights differ: kernels, or a split over ranks.", f"{inspect}; try --fp32"
    if now.is_first:
        return "Data or template do not fit the model, or the reward reads a wrong key.", inspect
    return None, f"{inspect}; lower --lr; --clip-grad limits each step"


def expert_routing(now: StepContext) -> Alert | None:
    """NUM05: experts chosen by the trainer against those chosen by the engine."""
    agreement = now.row.get("train/routing_agreement")
    if agreement is None or agreement >= ROUTING or now.facts.config.moe.use_rollout_routing_replay:
        return None
    return now.alert(
        "NUM05",
        f"the trainer agrees with {agreement:.1%} of the engine's expert choices for the trained tokens",
        evidence={"agreement": agreement},
        level=1 - agreement,
    )
