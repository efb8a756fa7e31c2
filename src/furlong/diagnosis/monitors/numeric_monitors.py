"""Monitors of numerics: log-probs of engine, trainer and reference, gradients, and expert routing."""

from __future__ import annotations

import math
import statistics

from furlong.catalogue import Severity
from furlong.diagnosis.monitors.monitor import Alert, Row, StepContext, StepMonitor

GAP = "train/train_rollout_logprob_abs_diff"
# KL to a reference with the same weights: kernels explain less than 1e-4; above 1 a setting is wrong (debugging guides
# of slime and Miles).
KL_JITTER, KL_WRONG = 1e-4, 1.0
# Mean |log-prob of trainer - of engine| per token. Miles checks rollout 0 against 0.03, slime against 0.1. With equal
# precision, furlong's own engine and trainer measure 1e-7 (float32), in bfloat16 at most 7e-3 with trained models, and
# up to 0.1 with random ones of large logits (`self_test.rounding_limit`).
GAP_WARNING, GAP_ERROR = 0.03, 0.1
# The same on tokens of an older policy, averaged over steps: how far the policy has moved since. The quickstart's model
# over 40 rollouts with 1 to 5 in flight: below 0.1 it learned as in a synchronous run, from 0.2 on less or not at all.
DRIFT, DRIFT_ROWS = 0.2, 8
# Mean log-prob of a model's own answers. The guides suspect the chat template of an instruct model from -0.8 on, which
# holds for large ones. Small and base models are less certain, so only a value near chance, -ln(vocabulary), is a
# warning. Measured with SmolLM2-135M-Instruct (docs/internals/evidence.md): 20 % to 28 % of chance for text and chat,
# in a wrong format, too; 34 % for questions without a chat format, each +-5 % with 12 answers. Exchanged or missing
# layers gave 45 % to 51 %, another tokenizer 61 %, a missing output layer 95 %; damages that leave the model as certain
# as it was are not visible here.
LIKELY, LARGE = -0.8, 10**9  # parameters of a model that `LIKELY` applies to
NEAR_CHANCE, UNTRAINED = 0.42, 0.8  # of chance
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
    kl = now.row.get("selftest/ref_kl", now.row.get("rollout/kl"))
    if kl is None and now.num_optimizer_steps == 1:
        kl = now.row.get("train/kl_loss")
    if not now.is_first or kl is None or abs(kl) <= KL_JITTER:
        return None
    kl, facts = abs(kl), now.facts
    is_warm_start = not facts.is_own_reference and facts.initial_weights != facts.model
    severity = "error" if kl > KL_WRONG else "warning" if facts.is_own_reference else "info"
    cause, remedies = None, ["inspect this step's samples (--save-debug-train-data)"]
    if is_warm_start:  # two models on purpose: their distance is no fault
        severity = "info"
        cause = f"Training starts from --load {facts.initial_weights}, which differs from the reference."
        remedies = [f"none if the reference is intended; --ref-load {facts.initial_weights} compares with the start"]
    elif not facts.is_own_reference:
        cause = f"--ref-load {facts.reference} is a different model from --hf-checkpoint {facts.model}."
        remedies = ["check --ref-load, or remove it to use --hf-checkpoint as the reference; ignore this if intended"]
    else:
        if facts.config.train.train_backend == "megatron":
            remedies.append("try --attention-backend flash")
        if not facts.config.train.fp32:
            remedies.append("try --fp32 if the run computes in bfloat16")
    return now.alert(
        "NUM01",
        f"KL from the policy to the reference is {kl:.3g} before any training "
        f"(policy {facts.initial_weights}, reference {facts.reference})",
        cause=cause,
        remedy="; ".join(remedies),
        severity=severity,
        evidence={"kl": kl, "model": facts.initial_weights, "reference": facts.reference},
        level=kl,
    )


def engine_mismatch(now: StepContext) -> Alert | None:
    """NUM02: log-probs of engine and trainer for the same tokens and weights."""
    gap = now.row.get(GAP)
    if gap is None or gap <= _usual_gap(now) or _is_stale(now.row) or not _is_gap_meaningful(now):
        return None
    shares = {
        name.removeprefix("selftest/share/"): value
        for name, value in now.row.items()
        if name.startswith("selftest/share/") and value > 0
    }
    largest = now.row.get("selftest/logp_max_diff")
    by_size = sorted(shares.items(), key=lambda item: -item[1])
    causes = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in by_size)
    first = by_size[0][0] if by_size else ""
    cause, remedy = _mismatch_cause(now, first)
    severity: Severity = "error" if gap > GAP_ERROR else "warning"
    if gap <= GAP_ERROR and first in ("numerics", "quantization", "unexplained") and now.facts.config.algo.use_tis:
        severity = "info"  # which importance sampling corrects
    return now.alert(
        "NUM02",
        f"log-probs of engine and trainer differ by {gap:.3g} per token for the same weights "
        f"(normal: below {_usual_gap(now):.2g}"
        + ("" if largest is None else f"; forward_logp_max_diff {largest:.3g}")
        + (f"); by cause: {causes}" if causes else ")"),
        cause=cause,
        remedy=remedy,
        severity=severity,
        evidence={"mean_abs_diff": gap, "shares": shares}
        | {name: now.row[name] for name in ("selftest/logp_max_diff", "selftest/logp_p99_diff") if name in now.row},
        level=gap,
    )


def _usual_gap(now: StepContext) -> float:
    """Return the gap up to which nothing is wrong: more in bfloat16 for a model with large logits."""
    shares = {name: value for name, value in now.selftest.items() if name.startswith("selftest/share/")}
    if max(shares, key=lambda name: shares[name], default="") != "selftest/share/numerics":
        return GAP_WARNING
    return max(GAP_WARNING, now.selftest.get("selftest/logp_rounding_limit", 0.0))


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
    return not (now.facts.has_old_policy and now.num_optimizer_steps > 1)


MISMATCH_REMEDIES = {
    "stale_version": "update weights after every rollout (--update-weights-interval 1); engines must report versions",
    "sampling_transform": "use the same --rollout-temperature in engine and trainer; the engine must report log-probs "
    "from before top-p and top-k, as SGLang does",
    "flat": "every token has the same log-prob in the engine: if your function fills them in, keep the engine's; if "
    "they are chance, -ln(vocabulary size), the engine's output layer got no weights (--check-weight-update-equal, "
    "and `furlong doctor --explain SYNC04`)",
    "quantization": "correct the difference with --use-tis, or train with the engine's values: --int4-qat for INT4",
    "routing": "add --use-rollout-routing-replay, or correct the mismatch with --use-tis",
    "numerics": "correct the difference with --use-tis, or compute in float32 (--embedded-dtype float32, --fp32)",
    "unexplained": "use the same precision in engine and trainer (--embedded-dtype auto), and compare the weights with "
    "--check-weight-update-equal; if both are equal, look at what sets rollout_log_probs and the prompt in your "
    "functions, and at the engine's sampling parameters; --use-tis corrects small differences",
}


def _mismatch_cause(now: StepContext, first: str) -> tuple[str | None, str]:
    """Return the cause (None: the catalogue's) and the remedy. `first`: the largest share, "" without a self-test."""
    config, first = now.facts.config, first or "unexplained"
    causes, remedy = list[str](), MISMATCH_REMEDIES[first]
    if first == "quantization":
        causes.append("The engine computes with quantized weights, the trainer does not.")
    elif first == "numerics":
        causes.append("Engine and trainer compute in bfloat16, whose rounding explains a gap of this size.")
    kv_cache = now.facts.quantized_kv_cache
    if kv_cache and first in ("quantization", "numerics", "unexplained"):
        is_external = config.cluster.engine == "external"
        flag = "--kv-cache-dtype" if is_external else "--sglang-kv-cache-dtype"
        causes.append(f"The engine rounds keys and values to {kv_cache} ({flag}); the trainer does not.")
        where = "start the engines' servers with" if is_external else "use"
        group = "" if is_external else " (in --sglang-config: kv_cache_dtype of the group)"
        remedy = f"{where} {flag} auto{group}; {remedy}"
    least = config.rollout.rollout_min_new_tokens
    if first == "unexplained" and least and config.cluster.engine != "embedded":
        causes.append(f"--rollout-min-new-tokens {least}: SGLang masks stop tokens before it computes log-probs.")
    return " ".join(causes) or None, remedy


def unlikely_responses(now: StepContext) -> Alert | None:
    """TPL03: a model with a chat format assigns low probability to its own responses."""
    config, facts = now.facts.config, now.facts
    log_prob = now.row.get("rollout/log_probs")
    if not now.is_first or log_prob is None or now.trains_foreign_tokens or not facts.vocab_size:
        return None
    if config.algo.loss_type != "policy_loss" or not facts.has_chat_template:
        return None
    if config.rollout.rollout_temperature > 1 or config.rollout.rollout_min_new_tokens:
        return None  # tokens that the model does not choose by itself
    share = log_prob / -math.log(facts.vocab_size)
    if share < NEAR_CHANCE and (log_prob > LIKELY or facts.num_parameters < LARGE):
        return None
    cause, remedy = _unlikely_cause(now, share)
    limit = (
        f"chance is {-math.log(facts.vocab_size):.3g}, a healthy model is above {NEAR_CHANCE:.0%} of it"
        if share >= NEAR_CHANCE
        else f"instruct models of this size are above {LIKELY} in their own format, base models may be below"
    )
    return now.alert(
        "TPL03",
        f"the trainer's mean log-prob of the first responses is {log_prob:.3f} per token ({limit})",
        cause=cause,
        remedy=remedy,
        severity="warning" if share >= NEAR_CHANCE else "info",
        evidence={
            "log_prob": log_prob,
            "share_of_chance": share,
            "apply_chat_template": config.data.apply_chat_template,
        },
    )


def _unlikely_cause(now: StepContext, share: float) -> tuple[str, str]:
    """Return the causes and how to tell them apart. `share`: the mean log-prob as a share of chance."""
    weights = "`furlong check DIR` reads the tensors of --hf-checkpoint"
    if share >= UNTRAINED:
        return "The model is untrained, or its weights were not loaded.", f"check --hf-checkpoint: {weights}"
    template = "`furlong doctor` with the same flags compares the prompts with the template (TPL01, TPL02)"
    if now.facts.config.data.apply_chat_template:
        form = (
            "they are rendered with --apply-chat-template, so check --apply-chat-template-kwargs and custom templates"
        )
    else:
        form = "--apply-chat-template is off; add it if they are plain questions or messages"
    return (
        "Two causes are possible: the prompts do not have the chat format that the model was trained on "
        f"({form}), or its weights are damaged, in the wrong place or those of a base model.",
        f"{template}, and `furlong template check` shows it; {weights}; a base model has an instruct version",
    )


def gradient(now: StepContext) -> Alert | None:
    """NUM03: a gradient norm far above the earlier ones, or a policy that changed before any optimizer step."""
    facts = now.facts
    ppo_kl = now.row.get("train/ppo_kl")
    if now.num_optimizer_steps == 1 and not facts.has_old_policy and ppo_kl is not None and abs(ppo_kl) > PPO_KL:
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
    spread, algo = now.row.get("rollout/reward_range", 0.0), now.facts.config.algo
    remedy = (
        "inspect this step's samples (--save-debug-rollout-data), their template (`furlong template check`) and "
        "--label-key"
    )
    cause = None
    if name == "train/ppo_kl":
        cause = "Two passes over the same weights differ: kernels, or a split over ranks."
        remedy += "; try --fp32"
    elif not (algo.grpo_std_normalization or algo.normalize_advantages) and spread > WIDE_REWARDS:
        cause = (
            f"Rewards spread over {spread:.4g} and are not divided by their standard deviation, so the gradient grows "
            "with them."
        )
        remedy = (
            "scale rewards to about 0 to 1, or remove --disable-grpo-std-normalization; --clip-grad limits each step "
            "until then"
        )
    elif now.is_first:
        cause = "Data or template do not fit the model, or the reward reads a wrong key."
    else:
        remedy += "; lower --lr; --clip-grad limits each step"
    return now.alert(
        "NUM03",
        f"{name} is {value:.4g}, {excess}",
        cause=cause,
        remedy=remedy,
        evidence={"metric": name, "value": value, "before": now.recent(name, 9)[:-1]},
        level=value,
        kind=name,
    )


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


MONITORS = (
    StepMonitor("TPL03", unlikely_responses),
    StepMonitor("NUM01", reference_kl, again=10),
    StepMonitor("NUM02", engine_mismatch, again=3),
    StepMonitor("NUM03", gradient, again=10),
    StepMonitor("NUM05", expert_routing, again=2),
    StepMonitor("ASYNC01", policy_drift, again=2),
)
