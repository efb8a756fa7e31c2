"""Monitors of numerics: log-probs of engine, trainer and reference, gradients, and expert routing."""

from __future__ import annotations

import math
import statistics

from furlong.catalogue import Severity
from furlong.config.sections import AlgoFlags
from furlong.core.algorithms import ALGORITHMS
from furlong.diagnosis.monitors.monitor import Alert, Row, StepContext, StepMonitor

GAP = "train/train_rollout_logprob_abs_diff"
# KL to a reference with the same weights: kernels explain less than 1e-4; above 1 a setting is wrong (debugging guides
# of slime and Miles).
KL_JITTER, KL_WRONG = 1e-4, 1.0
# Mean |log-prob of trainer - of engine| per token. Miles checks rollout 0 against 0.03, slime against 0.1. With equal
# precision, furlong's own engine and trainer measure 1e-7 (float32), in bfloat16 at most 7e-3 with trained models, and
# up to 0.1 with random ones of large logits (`self_test.rounding_limit`).
GAP_WARNING, GAP_ERROR = 0.03, 0.1
GAP_TOKENS = 32  # at least: the mean over six tokens of a healthy bfloat16 model may be as large
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
NEAR_CHANCE = 0.42  # of chance
# Log-ratio to the old policy before any update: Miles asserts 1e-9; repeated bfloat16 passes differ by 1e-3.
PPO_KL = 1e-2
# Gradient norms before clipping. The first was at most 9 in 17 CPU settings; in 40 rollouts of the quickstart none
# exceeded 1.6 times the median of the earlier ones.
FIRST_GRAD_NORM = 100.0
GRAD_JUMP = 20.0
LARGE_REWARDS = 10.0  # difference between the largest and the smallest
GRAD_ROWS, GRAD_LEAST = 32, 8
# Share of the engine's expert choices that the trainer agrees with; kernels alone leave more than 0.95.
ROUTING = 0.9


# Explained variance of a critic. On the quickstart's task, where chance decides most of the outcome, the mean over 32
# rollouts of a run that learns from 35 % to 82 % was at least 0.009; before training it was -0.45, after three rollouts
# above -0.03.
CRITIC, CRITIC_ROWS, CRITIC_NEWEST = "train/critic-explained_variance", 32, 8
SHORT_WARM_UP = -0.1
# The critic's loss as a multiple of its median: in the same run at most 2.
VALUE_LOSS, VALUE_JUMP = "train/critic-value_loss", 10.0
# KL to a teacher: below the first, both are the same weights; a KL above the second should fall within 64 rollouts.
TEACHER_KL, SAME_TEACHER, CLOSE_TEACHER, TEACHER_ROWS = "train/opd_reverse_kl", 1e-6, 0.05, 64


def reference_kl(now: StepContext) -> Alert | None:
    """NUM01: KL to the reference before the first optimizer step."""
    kl = now.row.get("selftest/ref_kl", now.row.get("rollout/kl"))
    if kl is None and now.num_optimizer_steps == 1:
        kl = now.row.get("train/kl_loss")
    if not now.is_first or kl is None or abs(kl) <= KL_JITTER:
        return None
    kl, start, reference = abs(kl), now.facts.initial_weights, now.facts.reference
    severity, cause, remedy = "error" if kl > KL_WRONG else "warning", None, None
    if start != reference:  # two models on purpose: their distance is no fault
        severity = "info"
        cause = f"Training starts from {start}, and the reference is another model, {reference}."
        remedy = f"none if the reference is intended; --ref-load {start} compares with the start"
    return now.alert(
        "NUM01",
        f"KL from the policy to the reference is {kl:.3g} before any training (policy {start}, reference {reference})",
        cause=cause,
        remedy=remedy,
        severity=severity,
        evidence={"kl": kl, "model": start, "reference": reference},
        level=kl,
    )


def engine_mismatch(now: StepContext) -> Alert | None:
    """NUM02: log-probs of engine and trainer for the same tokens and weights."""
    gap = now.row.get(GAP)
    if gap is None or gap <= _usual_gap(now) or _is_stale(now.row) or not _is_gap_meaningful(now):
        return None
    if now.facts.num_samples * now.row.get("rollout/response_len/mean", math.inf) < GAP_TOKENS:
        return None
    shares = {
        name.removeprefix("selftest/share/"): value
        for name, value in now.selftest.items()
        if name.startswith("selftest/share/") and value > 0
    }
    largest = now.row.get("selftest/logp_max_diff")
    by_size = sorted(shares.items(), key=lambda item: -item[1])
    causes = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in by_size)
    first = by_size[0][0] if by_size else ""
    cause, remedy = MISMATCHES[first or "unexplained"]
    if (flag := now.facts.generating_flag) and first in ("", *OF_FUNCTIONS):
        cause, remedy = OF_FUNCTIONS[first or "unexplained"]
        remedy = remedy.format(flag)
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
    age, config = now.row.get("rollout/staleness/mean", 0.0), now.facts.config
    mismatch = f"; engine and trainer differ by {fresh:.2g} on fresh samples" if fresh > GAP_WARNING else ""
    return now.alert(
        "ASYNC01",
        f"samples are {age:.2g} rollouts old on average, as the flags allow, and the policy has "
        f"moved by {gap:.2g} in log-prob per token since (over {DRIFT_ROWS} steps; 0.1 is mostly harmless"
        f"{mismatch})",
        cause="Training uses answers that the current policy would hardly give.",
        remedy="lower --async-buffer-size, --update-weights-interval or --lr"
        + "; --use-tis corrects part of the drift" * (not config.algo.use_tis)
        + "; --mask-offpolicy-in-partial-rollout leaves old tokens out" * config.rollout.partial_rollout,
        evidence={"mean_abs_diff": gap, "fresh": fresh, "mean": age},
        level=gap,
        kind="drift",
    )


def _is_stale(row: Row) -> bool:
    return row.get("rollout/staleness/max", 0.0) > 0


def _is_gap_meaningful(now: StepContext) -> bool:
    if now.facts.config.algo.loss_type == "sft_loss" or now.trains_foreign_tokens:
        return False  # the engine has no log-probs of tokens that it did not sample: TOOL01
    # With several optimizer steps per rollout, the gap to an old policy includes their updates.
    return not (now.facts.has_old_policy and now.num_optimizer_steps > 1)


# Cause and remedy by the largest share of the self-test.
MISMATCHES: dict[str, tuple[str, str]] = {
    "stale_version": (
        "Older weights sampled the tokens than the engine reported.",
        "update weights after every rollout (--update-weights-interval 1); engines must report versions",
    ),
    "sampling_transform": (
        "The engine's log-probs are those of another temperature, or after top-p or top-k.",
        "use the same --rollout-temperature in engine and trainer; the engine must report log-probs from before top-p "
        "and top-k, as SGLang does",
    ),
    "flat": (
        "Every token has the same log-prob in the engine.",
        "if your function fills them in, keep the engine's; if they are chance, -ln(vocabulary size), the engine's "
        "output layer got no weights (--check-weight-update-equal, and `furlong doctor --explain SYNC04`)",
    ),
    "shifted": (
        "Each token has the log-prob of its neighbor: the lists are shifted by one.",
        "pair tokens and log-probs from the same position of the engine's answer",
    ),
    "quantization": (
        "The engine computes with quantized weights, the trainer does not.",
        "correct the difference with --use-tis, or train with the engine's values: --int4-qat for INT4",
    ),
    "routing": (
        "Engine and trainer choose different experts.",
        "add --use-rollout-routing-replay, or correct the mismatch with --use-tis",
    ),
    "numerics": (
        "Engine and trainer compute in bfloat16, whose rounding explains a gap of this size.",
        "correct the difference with --use-tis, or compute in float32 (--embedded-dtype float32, --fp32)",
    ),
    "unexplained": (
        "Candidates: another precision or kernel, other weights in the engine, or a custom function that changes "
        "tokens or log-probs.",
        "use the same precision in engine and trainer (--embedded-dtype auto; --sglang-kv-cache-dtype auto), and "
        "compare the weights with --check-weight-update-equal; if both are equal, look at what sets rollout_log_probs "
        "and the prompt in your functions, and at the engine's sampling parameters (SGLang computes log-probs after "
        "--rollout-min-new-tokens masks stop tokens); --use-tis corrects small differences",
    ),
}


# The same if the user's code, which {} names, passes on the engine's log-probs.
OF_FUNCTIONS: dict[str, tuple[str, str]] = {
    "sampling_transform": (
        "The samples were drawn at another temperature, or with other top-p or top-k, than the trainer assumes.",
        "pass `sampling_params` unchanged to the engine in {}, or set --rollout-temperature and the like to its values",
    ),
    "unexplained": (
        "Neither versions, sampling parameters nor rounding explain it. Candidates: log-probs that do not belong to "
        "these tokens, or are not natural logarithms of probabilities.",
        "check what {} stores in rollout_log_probs; if it stores the engine's values, compare the weights with "
        "--check-weight-update-equal",
    ),
}


def unlikely_responses(now: StepContext) -> Alert | None:
    """TPL03: a model with a chat format assigns low probability to its own responses."""
    config, facts = now.facts.config, now.facts
    log_prob = now.row.get("rollout/log_probs")
    if not now.is_first or log_prob is None or now.trains_foreign_tokens or not facts.vocab_size:
        return None
    if config.algo.loss_type != "policy_loss" or not facts.has_chat_template or facts.has_random_weights:
        return None
    if config.rollout.rollout_temperature > 1 or config.rollout.rollout_min_new_tokens:
        return None  # tokens that the model does not choose by itself
    share = log_prob / -math.log(facts.vocab_size)
    if share < NEAR_CHANCE and (log_prob > LIKELY or facts.num_parameters < LARGE):
        return None
    limit = (
        f"chance is {-math.log(facts.vocab_size):.3g}, a healthy model is above {NEAR_CHANCE:.0%} of it"
        if share >= NEAR_CHANCE
        else f"instruct models of this size are above {LIKELY} in their own format, base models may be below"
    )
    return now.alert(
        "TPL03",
        f"the trainer's mean log-prob of the first responses is {log_prob:.3f} per token ({limit})",
        cause="The prompts do not have the chat format that the model was trained on, or its weights are damaged, not "
        "loaded, or those of a base model.",
        remedy="`furlong doctor` with the same flags compares the prompts with the template (TPL01, TPL02); check "
        "--apply-chat-template and `furlong template check`; `furlong check DIR` reads the tensors of --hf-checkpoint; "
        "a base model has an instruct version",
        severity="warning" if share >= NEAR_CHANCE else "info",
        evidence={
            "log_prob": log_prob,
            "share_of_chance": share,
            "apply_chat_template": config.data.apply_chat_template,
        },
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
    # A single one that is clipped does no harm.
    is_single = facts.config.optim.clip_grad > 0 and max(before) <= GRAD_JUMP * usual
    excess = f"{norm / usual:.0f} times the median of the earlier steps"
    return _gradient_alert(now, "train/grad_norm", norm, excess, severity="info" if is_single else None)


def _divides_rewards(algo: AlgoFlags) -> bool:
    row = ALGORITHMS.get(algo.advantage_estimator)  # None for one that this process does not know
    is_in_groups = row is None or row.baseline != "none"
    return algo.normalize_advantages or (algo.rewards_normalization and algo.grpo_std_normalization and is_in_groups)


def _gradient_alert(now: StepContext, name: str, value: float, excess: str, severity: Severity | None = None) -> Alert:
    algo, reward_range = now.facts.config.algo, now.row.get("rollout/reward_range", 0.0)
    cases = (
        (name == "train/ppo_kl", "Two passes over the same weights differ: kernels, or a split over ranks.",
         "try --fp32"),
        (algo.use_kl_loss and algo.kl_loss_coef > 1, f"--kl-loss-coef {algo.kl_loss_coef:g} outweighs the reward.",
         "use 0.001 to 0.1"),
        (algo.loss_type == "custom_loss", "Candidates: the scale of --custom-loss-function-path, or samples.",
         "check that function"),
        (reward_range > LARGE_REWARDS and not _divides_rewards(algo),
         f"Rewards range over {reward_range:.3g} and are not divided by their standard deviation.",
         "scale rewards to about 0 to 1"
         + ("" if algo.grpo_std_normalization else ", or remove --disable-grpo-std-normalization")),
        (True, "Candidates: samples or a chat template that do not fit the model, or steps that are too large.",
         "inspect this step's samples (--save-debug-rollout-data) and their template (`furlong template check`); lower "
         "--lr; --clip-grad limits each step"),
    )  # fmt: skip
    cause, remedy = next((cause, remedy) for applies, cause, remedy in cases if applies)
    return now.alert(
        "NUM03",
        f"{name} is {value:.4g}, {excess}",
        cause=cause,
        remedy=remedy,
        severity=severity,
        evidence={"metric": name, "value": value, "before": now.recent(name, 9)[:-1], "reward_range": reward_range},
        level=value,
        kind=f"{name} {severity}",
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


def critic(now: StepContext) -> Alert | None:
    """NUM07: a critic that explains nothing of the returns, and one whose values diverge."""
    explained, loss = now.row.get(CRITIC), now.row.get(VALUE_LOSS)
    if explained is None or loss is None:
        return None
    before = now.recent(VALUE_LOSS, GRAD_ROWS + 1)[:-1]
    evidence = {"explained_variance": explained, "value_loss": loss, "values": now.row.get("rollout/values")}
    if len(before) >= GRAD_LEAST and explained < -1 and loss > VALUE_JUMP * statistics.median(before):
        return now.alert(
            "NUM07",
            f"the values of the critic diverge: its loss is {loss:.3g}, {loss / statistics.median(before):.0f} times "
            f"the median of the earlier steps, and the explained variance {explained:.3g}",
            cause="The critic's learning rate is too high, or rewards are large.",
            remedy="lower --critic-lr or --clip-grad, or scale rewards to about 0 to 1",
            evidence=evidence,
            level=loss,
            kind="diverges",
        )
    rows = now.recent(CRITIC, CRITIC_ROWS)
    if len(rows) < CRITIC_ROWS or (mean := statistics.fmean(rows)) > 0:
        return None
    if statistics.fmean(rows[-CRITIC_NEWEST:]) > 0:  # it began far below 0, and learns
        return None
    return now.alert(
        "NUM07",
        f"the critic explains nothing of the returns: the explained variance is {mean:.3g} over {len(rows)} rollouts, "
        "and 0 is that of a constant",
        evidence=evidence | {"mean": mean},
        level=-mean,
        kind="nothing",
    )


def value_warm_up(now: StepContext) -> Alert | None:
    """NUM08: the first update of the policy with a critic that is worse than a constant."""
    algo, explained = now.facts.config.algo, now.row.get(CRITIC)
    if explained is None or explained >= SHORT_WARM_UP or now.step != algo.num_critic_only_steps + 1:
        return None
    if algo.critic_lr == 0:  # NUM07
        return None
    return now.alert(
        "NUM08",
        f"the policy is trained for the first time, with a critic whose explained variance is {explained:.3g}",
        evidence={"explained_variance": explained, "num_critic_only_steps": algo.num_critic_only_steps},
        severity="info" if algo.num_critic_only_steps else "warning",
    )


def foreign_teacher(now: StepContext) -> Alert | None:
    """OPD01: a teacher to which the first responses are noise."""
    teacher, vocab = now.row.get("rollout/teacher_log_probs"), now.facts.vocab_size
    if not now.facts.config.opd.use_opd or teacher is None or not now.is_first or not vocab:
        return None
    if teacher > -math.log(vocab) or now.row.get("rollout/log_probs", 0.0) < NEAR_CHANCE * -math.log(vocab):
        return None
    return now.alert(
        "OPD01",
        f"the teacher's mean log-prob of the first responses is {teacher:.3g} per token, and that of random tokens is "
        f"{-math.log(vocab):.3g}",
        severity="warning",
        evidence={"teacher_log_probs": teacher, "vocab_size": vocab},
    )


def teacher_of_itself(now: StepContext) -> Alert | None:
    """OPD02: a teacher with the weights of the policy."""
    kl = now.row.get(TEACHER_KL)
    if kl is None or not now.is_first or now.num_optimizer_steps > 1 or abs(kl) > SAME_TEACHER:
        return None
    return now.alert(
        "OPD02", f"the KL to the teacher is {kl:.1g} before the first update: it has the policy's weights",
        evidence={"opd_reverse_kl": kl},
    )  # fmt: skip


def teacher_kl(now: StepContext) -> Alert | None:
    """OPD03: a KL to the teacher that is where it began."""
    rows = now.recent(TEACHER_KL, TEACHER_ROWS)
    if len(rows) < TEACHER_ROWS or not now.facts.config.opd.opd_kl_coef or now.reported("OPD02"):
        return None
    quarter = TEACHER_ROWS // 4
    if now.step > TEACHER_ROWS + quarter:  # the rows do not begin where the run does
        return None
    before, after = statistics.fmean(rows[:quarter]), statistics.fmean(rows[-quarter:])
    if before < CLOSE_TEACHER or after < before:
        return None
    return now.alert(
        "OPD03",
        f"the KL to the teacher was {before:.3g} and is {after:.3g} after {len(rows)} rollouts",
        evidence={"before": before, "after": after},
        level=after,
    )


MONITORS = (
    StepMonitor("OPD01", foreign_teacher),
    StepMonitor("OPD02", teacher_of_itself),
    StepMonitor("OPD03", teacher_kl, again=2),
    StepMonitor("TPL03", unlikely_responses),
    StepMonitor("NUM01", reference_kl, again=10),
    StepMonitor("NUM02", engine_mismatch, again=3),
    StepMonitor("NUM03", gradient, again=10),
    StepMonitor("NUM05", expert_routing, again=2),
    StepMonitor("NUM07", critic, again=10),
    StepMonitor("NUM08", value_warm_up),
    StepMonitor("ASYNC01", policy_drift, again=2),
)
