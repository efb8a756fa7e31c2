"""Monitors of rollouts: truncation, rewards, user functions, data loading, staleness and tools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from furlong.diagnosis.monitors.monitor import HISTORY, Alert, Row, RunFacts, StepContext
from furlong.errors import ConfigError
from furlong.tools.template_test import describe_ends

TRUNCATED, TRUNCATED_STEPS = 0.9, 2  # share, in the first steps; tight limits of healthy recipes truncate 0.3 to 0.7
SHORT_ANSWER = 4  # a limit below which answers that get rewards need no end of turn, as of classifiers
TRUNCATED_LEAST, TRUNCATED_SAMPLES = 0.75, 16  # share that is certain, and samples that decide in longer first steps
SIGMAS = 2.0  # of a share that is certain
NO_SPREAD_STEPS = 3  # steps in a row; hard data can give one or two without a right answer
NO_SPREAD_SAMPLES = 64  # at 10 % right answers, this many are equal once in 700 times
ENDED = 0.5  # truncated share of the first step below which stop tokens must be right
COLLAPSED_CAUSE = "The policy left what earned the reward: the steps are too large, or nothing pulls it back."
LARGE_ENTROPY, LARGE_KL = 0.02, 1.0  # coefficients from which on a bonus or the KL can outweigh the reward
COLLAPSE_OF, COLLAPSE_TO, COLLAPSE_ROWS = 0.2, 0.1, 5  # a mean reward above the first fell to this part of it
COLLAPSE_SUM = 20.0  # rewards of 1 in a mean: 2 where 10 are usual happens once in 360 times
FAILED_WARNING = 0.01  # of the samples; below it the severity is info: a verifier may time out once
BLOCKED_SHARE, BLOCKED_LEAST_S = 0.5, 1.0  # of a rollout, and at least
DATA_SHARE, DATA_ROWS, DATA_LEAST_S = 0.2, 3, 0.005  # of a step, in each of these steps, and at least
DATA_MEAN_S = 0.1  # or on average: more than one pause of the process (garbage collection, a busy machine)
REWARD_SHARE, REWARD_ROWS, REWARD_LEAST_S = 0.5, 3, 1.0  # of a rollout, in each of these steps, and at least
CONTEXT_FULL = 0.1  # of the samples


def truncation(now: StepContext) -> Alert | None:
    """STOP02: the first responses are truncated."""
    ratio = now.row.get("rollout/truncated_ratio")
    if ratio is not None and now.facts.generating_flag:
        ratio -= now.row.get("rollout/context_full_frac", 0.0)  # of conversations: TOOL02
    if ratio is None or ratio < TRUNCATED or not _is_surely_truncated(now):
        return None
    limit = now.facts.config.rollout.rollout_max_response_len
    if limit is not None and limit < SHORT_ANSWER and now.row.get("rollout/reward_range", 0.0) > 0:
        return None
    place = f"at --rollout-max-response-len {limit}" if limit else "by the context limit"
    raised = "--rollout-max-response-len" if limit else "--rollout-max-context-len"
    before = now.history[0].get("rollout/truncated_ratio", ratio) if now.history else ratio
    ends, missing = _end_tokens(now.facts)
    note, cause = f"; {ends}" if ends else "", None
    remedy = (
        "set the model's end of turn with --rollout-stop-token-ids or --rollout-stop (print a sample with "
        f"--debug-rollout-print-every 1 to see it), or raise {raised}"
    )
    if missing:
        cause = "The chat template ends a turn with a token that does not stop generation."
        ids = " ".join(map(str, missing))
        remedy = f"add --rollout-stop-token-ids {ids}; if responses are still cut off, raise {raised}"
    if (setting := _endless_setting(now.facts)) is not None:
        cause, remedy = setting[0], f"{setting[1]}; {remedy}"
    if before < ENDED:  # with the same flags, responses ended before the weights changed
        note, (cause, remedy) = f" ({before:.0%} in the first step)", _collapse_cause(now.facts)
    return now.alert(
        "STOP02",
        f"{ratio:.0%} of the responses were cut off {place}, without an end of turn{note}",
        cause=cause,
        remedy=remedy,
        evidence={
            "truncated_ratio": ratio,
            "longest": now.row.get("rollout/response_len/max"),
            "max_response_len": limit,
        },
    )


def _is_surely_truncated(now: StepContext) -> bool:
    """Whether the last steps, all truncated, are among the first ones and have enough samples to be no coincidence."""
    size = _num_samples(now.facts)
    if now.step >= now.facts.first_step + max(TRUNCATED_STEPS, math.ceil(TRUNCATED_SAMPLES / size)):
        return False
    ratios: list[float] = []
    for row in (now.row, *reversed(now.history)):
        if row.get("rollout/truncated_ratio", 0.0) < TRUNCATED:
            break
        ratios.append(row["rollout/truncated_ratio"])
    return _least_share(sum(ratios) / len(ratios), size * len(ratios)) > TRUNCATED_LEAST


def _num_samples(facts: RunFacts) -> float:
    """Return the samples of a step; infinite if the configuration, of another version, does not say."""
    return facts.num_samples or math.inf


def _least_share(share: float, count: float) -> float:
    """Return the lower end of Wilson's interval of a share of `count` samples, `SIGMAS` wide to each side."""
    square = SIGMAS**2 / count
    spread = SIGMAS * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return (share + square / 2 - spread) / (1 + square)


def _endless_setting(facts: RunFacts) -> tuple[str, str] | None:
    """Return the cause and the fix of sampling parameters that keep responses from ending; None without such ones."""
    rollout = facts.config.rollout
    least, limit, temperature = (
        rollout.rollout_min_new_tokens,
        rollout.rollout_max_response_len,
        rollout.rollout_temperature,
    )
    if limit and least >= limit:
        return (
            f"--rollout-min-new-tokens {least} bans stop tokens up to the limit of {limit} tokens.",
            f"lower --rollout-min-new-tokens, or raise --rollout-max-response-len above {least}",
        )
    if temperature > 1:
        return (
            f"At --rollout-temperature {temperature:g} text becomes random and may never reach its end; or a stop "
            "token is missing, or the limit too low.",
            "try --rollout-temperature 1 first",
        )
    return None


def _collapse_cause(facts: RunFacts) -> tuple[str, str]:
    """Return why a policy may have left what earned the reward, by the weights of the loss's terms, and the fix."""
    algo = facts.config.algo
    back = "restart, or resume from a checkpoint before that, with"
    if algo.entropy_coef >= LARGE_ENTROPY:
        return (
            f"The entropy bonus may outweigh the reward (--entropy-coef {algo.entropy_coef:g}), or the steps are too "
            "large.",
            f"{back} a lower --entropy-coef (0.001 is common), or a lower --lr",
        )
    terms = [("--kl-coef", algo.kl_coef)]  # in the reward
    terms += [("--kl-loss-coef", algo.kl_loss_coef)] * algo.use_kl_loss
    flag, coefficient = max(terms, key=lambda term: term[1])
    if coefficient >= LARGE_KL:
        return (
            f"The KL term may outweigh the reward ({flag} {coefficient:g}), or the steps are too large.",
            f"{back} a lower {flag} (0.001 to 0.1 is common), or a lower --lr",
        )
    pull = "--use-kl-loss --kl-loss-type k3 and a --kl-loss-coef of 0.001 to 0.1"
    if coefficient or algo.use_kl_loss:
        pull = f"a larger {flag} (now {coefficient:g})"
    bonus = f", without the entropy bonus (--entropy-coef {algo.entropy_coef:g})" if algo.entropy_coef > 0 else ""
    return COLLAPSED_CAUSE, f"{back} a lower --lr, or with {pull}{bonus}"


def _end_tokens(facts: RunFacts) -> tuple[str, list[int]]:
    """Describe what ends a response, and list ids that should; nothing if the model folder is gone."""
    rollout = facts.config.rollout
    stop_ids, stop = rollout.rollout_stop_token_ids or (), rollout.rollout_stop or ()
    try:
        return describe_ends(Path(facts.model), stop_token_ids=stop_ids, stop=stop)
    except (ConfigError, OSError):
        return "", []


def rewards_without_spread(now: StepContext) -> Alert | None:
    """REW02: rewards no longer distinguish samples, or have collapsed."""
    reward = now.row.get("rollout/raw_reward")
    if reward is None or now.facts.config.algo.loss_type == "sft_loss":
        return None
    rows = _rows_without_spread(now)
    if rows >= NO_SPREAD_STEPS and rows * _num_samples(now.facts) >= NO_SPREAD_SAMPLES:
        return _no_spread(now, reward, rows)
    if (fall := _fall(now)) is None:
        return None
    best, last, size = fall
    return _collapse(now, best, last, f"averaged over {size} steps")


def _fall(now: StepContext) -> tuple[float, float, int] | None:
    """Return the best and the last mean reward, if it fell, and over how many steps they are averaged."""
    values = now.recent("rollout/raw_reward", HISTORY)
    best = max(_means(values, COLLAPSE_ROWS), default=0.0)
    if best < COLLAPSE_OF:
        return None
    size = max(COLLAPSE_ROWS, math.ceil(COLLAPSE_SUM / (best * _num_samples(now.facts))))
    if len(values) < 3 * size:
        return None
    means = _means(values, size)
    best, last = max(means), means[-1]
    return None if best < COLLAPSE_OF or last > COLLAPSE_TO * best else (best, last, size)


def _means(values: Sequence[float], size: int) -> list[float]:
    """Return the means of each `size` values in a row."""
    return [sum(values[i : i + size]) / size for i in range(len(values) - size + 1)]


def _collapse(now: StepContext, best: float, last: float, note: str) -> Alert:
    cause, remedy = _collapse_cause(now.facts)
    return now.alert(
        "REW02",
        f"the mean reward fell from {best:.3g} to {last:.3g}, {note}",
        cause=cause,
        remedy=remedy,
        evidence={"best": best, "last": last},
        kind="fall",
    )


def _rows_without_spread(now: StepContext) -> int:
    """Count the rows in a row, ending with this one, in which no two comparable rewards differ.

    Rewards are compared within groups; across the rows if there is one sample per prompt or no group baseline.
    """
    count, reward = 0, now.row["rollout/raw_reward"]
    for row in (now.row, *reversed(now.history)):
        if _compares_in_groups(row, now.facts):
            is_flat = row.get("rollout/zero_std_frac", 0.0) >= 1
        else:
            is_flat = row.get("rollout/reward_range") == 0 and math.isclose(
                row.get("rollout/raw_reward", math.nan), reward
            )
        if not is_flat:
            break
        count += 1
    return count


def _compares_in_groups(row: Row, facts: RunFacts) -> bool:
    """Whether a step compares rewards within groups; rows of older versions, without `reward_range`, always did."""
    in_groups = facts.compares_in_groups and "rollout/zero_std_frac" in row
    return in_groups or "rollout/reward_range" not in row


def _no_spread(now: StepContext, reward: float, rows: int) -> Alert:
    facts, in_groups = now.facts, _compares_in_groups(now.row, now.facts)
    best = max((row.get("rollout/raw_reward", 0.0) for row in now.history), default=0.0)
    is_same = now.row.get("rollout/reward_range", 0.0) == 0
    if is_same and reward == 0 and best >= COLLAPSE_OF:
        return _collapse(now, best, reward, f"and stayed there for {rows} steps: there is no learning signal")
    is_known = is_same and (reward in (0.0, 1.0) or "rollout/reward_range" in now.row)
    pattern = f"every reward is {reward:.3g}" if is_known else "all samples of each group score the same"
    cause, remedy = _no_spread_cause(facts, in_groups, reward if is_known else None)
    if in_groups and not is_same:  # so the verifier does distinguish right and wrong answers
        cause = "Every sample of a prompt gets the same answer, or all prompts are too easy or too hard."
        remedy = (
            "raise --rollout-temperature (--entropy-coef keeps the policy from becoming certain) or "
            "--n-samples-per-prompt, or use prompts that are sometimes answered right"
        )
    return now.alert(
        "REW02",
        f"{pattern} for {rows} steps in a row, so there is no learning signal",
        cause=cause,
        remedy=remedy,
        evidence={
            "raw_reward": reward,
            "steps": rows,
            "label_key": facts.config.data.label_key,
        },
        level=rows,
        kind=pattern,
    )


def _no_spread_cause(facts: RunFacts, in_groups: bool, every: float | None) -> tuple[str | None, str]:
    """Return the cause (None: the catalogue's) and the remedy. `every` is the reward of all samples, if known."""
    inspect = "on a sample of --debug-rollout-print-every 1, and with `furlong reward test` and the same flags"
    label_key = facts.config.data.label_key
    if every == 0:
        never = "The reward function never gives a reward"
        if label_key:
            never = f"The verifier never finds an answer that matches the label (--label-key {label_key})"
        easier = "use a larger --n-samples-per-prompt" if in_groups else "use easier prompts"
        return (
            f"{never}, or the task is too hard.",
            f"check --label-key and the answer format that the reward expects, {inspect}; if the task is too hard, "
            f"{easier}",
        )
    if every == 1:
        drop = ", or a --dynamic-sampling-filter-path that drops such groups" if in_groups else ""
        return (
            "The task is solved, or the reward function accepts everything.",
            f"use harder data{drop}; check the reward function",
        )
    if in_groups and every is None:
        return None, "raise --n-samples-per-prompt, or check the reward function with --debug-rollout-print-every 1"
    return "The reward function returns the same value for any answer.", f"check the reward function {inspect}"


def _failures(now: StepContext, stage: str) -> tuple[float, float, float]:
    """Return how many calls of a stage failed and timed out, and their share of the step's samples."""
    failed = now.row.get(f"rollout/{stage}_failed", 0.0)
    timed_out = now.row.get(f"rollout/{stage}_timed_out", 0.0)
    return failed, timed_out, (failed + timed_out) / max(now.facts.num_samples, 1)


def failed_rewards(now: StepContext) -> Alert | None:
    """REW03: reward calls that failed or timed out; they are counted, not averaged."""
    failed, timed_out, share = _failures(now, "reward")
    if not failed + timed_out:
        return None
    return now.alert(
        "REW03",
        f"{failed + timed_out:.0f} of about {now.facts.num_samples} reward calls gave no reward "
        f"({failed:.0f} failed, {timed_out:.0f} timed out); those samples are left out, not counted as 0",
        cause="The function or its server raised or did not answer in time; the log has the first reasons.",
        remedy="fix the function; `furlong reward test` with the same flags runs it on rows of the data"
        if failed >= timed_out
        else "raise --reward-timeout or --num-reward-workers, or make the function faster",
        severity="warning" if share >= FAILED_WARNING else "info",
        evidence={"failed": failed, "timed_out": timed_out, "share": share},
        level=share,
    )


def failed_generation(now: StepContext) -> Alert | None:
    """HOOK01: samples that were not generated because a custom generate function raised or took too long."""
    failed, timed_out, share = _failures(now, "generate")
    failed -= now.row.get("rollout/episodes/silent", 0.0)  # AGT07
    if not failed + timed_out:
        return None
    return now.alert(
        "HOOK01",
        f"{failed + timed_out:.0f} of about {now.facts.num_samples} samples were not generated "
        f"({failed:.0f} failed, {timed_out:.0f} timed out); they are left out of the batch",
        cause=f"{now.facts.generating_flag} raised, or waited too long for something; the log has the first reasons."
        if now.facts.generating_flag
        else "Responses took longer than --generate-timeout.",
        remedy="fix the error in the log (`grep 'generate function failed' run.log`)"
        if failed >= timed_out
        else "raise --generate-timeout, or make what the function waits for faster",
        severity="warning" if share >= FAILED_WARNING else "info",
        evidence={"failed": failed, "timed_out": timed_out, "share": share},
        level=share,
    )


def blocking_generation(now: StepContext) -> Alert | None:
    """HOOK02: the share of a rollout during which a generate function blocked the event loop."""
    if now.facts.config.session.environment:
        return None
    return _blocking(now, "HOOK02", now.facts.generating_flag or "--custom-generate-function-path")


def blocking_environment(now: StepContext) -> Alert | None:
    """AGT05: the share of a rollout during which an environment blocked the event loop."""
    if not now.facts.config.session.environment:
        return None
    return _blocking(now, "AGT05", f"--environment {now.facts.config.session.environment[0]}")


def _blocking(now: StepContext, id: str, what: str) -> Alert | None:
    blocked, whole = now.row.get("perf/generate_held_time", 0.0), now.row.get("perf/rollout_time", 0.0)
    if blocked < BLOCKED_LEAST_S or blocked < BLOCKED_SHARE * whole:
        return None
    share = min(blocked / whole, 1.0)
    return now.alert(
        id,
        f"{what} blocked the event loop for {blocked:.3g} s of the "
        f"rollout's {whole:.3g} s ({share:.0%}); other samples and requests waited",
        evidence={"held_s": blocked, "rollout_s": whole},
        level=share,
    )


def reward_wait(now: StepContext) -> Alert | None:
    """REW04: most of each rollout passes without generation, waiting for rewards."""
    reward_s = now.recent("perf/reward_wait_time", REWARD_ROWS)
    rollout_s = now.recent("perf/rollout_time", REWARD_ROWS)
    waited = now.row.get("perf/wait_time_ratio", 0.0)
    if len(reward_s) < REWARD_ROWS or len(rollout_s) < REWARD_ROWS or waited < DATA_SHARE:
        return None
    if any(s < max(REWARD_SHARE * whole, REWARD_LEAST_S) for s, whole in zip(reward_s, rollout_s, strict=True)):
        return None
    seconds, whole = sum(reward_s) / len(reward_s), sum(rollout_s) / len(rollout_s)
    timed_out = now.row.get("rollout/reward_timed_out", 0.0)
    return now.alert(
        "REW04",
        f"for {seconds:.3g} s of a rollout's {whole:.3g} s ({seconds / whole:.0%}, mean of "
        f"{REWARD_ROWS} steps) nothing was generated and rewards were awaited",
        remedy="; ".join(_faster_rewards(now.facts, timed_out)),
        evidence={"reward_wait_s": seconds, "rollout_s": whole, "timed_out": timed_out},
        level=seconds / whole,
    )


def _faster_rewards(facts: RunFacts, timed_out: float) -> list[str]:
    """List what shortens the wait for rewards, likeliest first."""
    reward, timeout_s = facts.config.reward, facts.config.fault.reward_timeout
    remedies: list[str] = []
    if timed_out:
        remedies.append(
            f"lower --reward-timeout (now {timeout_s:g} s) if calls hang: {timed_out:.0f} of this step used all of it"
        )
    if facts.has_reward_server:
        remedies.append("use a faster server at --rm-url, or several behind that address")
    else:
        more = f"raise --num-reward-workers (now {reward.num_reward_workers}), up to the number of free CPUs"
        remedies.append(f"{more}, if the function computes" if reward.custom_rm_path else more)
    if reward.custom_rm_path:
        remedies.append(
            "if it waits for a server or a process, make it an `async def` function: a worker then has many calls in "
            "flight instead of one"
        )
    if facts.can_run_ahead:
        remedies.append("use --async-buffer-size 1, which scores a rollout while the previous one is trained on")
    return remedies


def data_wait(now: StepContext) -> Alert | None:
    """DATA03: the share of a step spent reading prompts."""
    data_s, step_s = now.recent("perf/data_time", DATA_ROWS), now.recent("perf/step_time", DATA_ROWS)
    waited = now.row.get("perf/wait_time_ratio", 0.0)
    if len(data_s) < DATA_ROWS or len(step_s) < DATA_ROWS or waited < DATA_SHARE:
        return None
    share, mean_s = sum(data_s) / sum(step_s), sum(data_s) / len(data_s)
    is_steady = all(d >= max(DATA_SHARE * s, DATA_LEAST_S) for d, s in zip(data_s, step_s, strict=True))
    if share < DATA_SHARE or not (is_steady or mean_s >= DATA_MEAN_S):
        return None
    workers = now.facts.config.data.num_data_workers
    return now.alert(
        "DATA03",
        f"reading prompts takes {mean_s:.3g} s, {share:.0%} of a step (--num-data-workers {workers})",
        remedy=f"use --num-data-workers {max(2 * workers, 4)}, --streaming-data, or `furlong data tokenize` before "
        "the run; if you have a custom data source, make it faster",
        evidence={"data_s": mean_s, "share": share, "num_data_workers": workers},
        level=share,
    )


def staleness(now: StepContext) -> Alert | None:
    """ASYNC01: staleness of the trained tokens against the bound that the flags promise."""
    oldest, mean = now.row.get("rollout/staleness/max"), now.row.get("rollout/staleness/mean")
    bound, rollout = now.facts.max_staleness, now.facts.config.rollout
    if oldest is None or mean is None:
        return None
    # Partial rollouts carry tokens over, so the bound then applies to the mean.
    age = mean if rollout.partial_rollout else oldest
    if age <= bound + (1 if rollout.partial_rollout else 0):
        return None
    over_sampling = rollout.over_sampling_batch_size if rollout.partial_rollout else None
    return now.alert(
        "ASYNC01",
        f"samples are at most {oldest:.0f} and on average {mean:.2g} rollouts old; the flags promise {bound}",
        remedy=(
            f"lower --over-sampling-batch-size (now {over_sampling}): surplus samples are trained on later; "
            if over_sampling
            else ""
        )
        + "lower --async-buffer-size, set --update-weights-interval 1, or exclude old tokens from the loss with "
        "--mask-offpolicy-in-partial-rollout",
        evidence={"max": oldest, "mean": mean, "bound": bound},
        level=age,
    )


def tool_output(now: StepContext) -> Alert | None:
    """TOOL01: tokens in the loss that no engine sampled."""
    samples = now.row.get("rollout/env_tokens_in_loss", 0.0)
    if not samples:
        return None
    return now.alert(
        "TOOL01",
        f"{samples:.0f} samples train on tokens that the policy did not sample",
        evidence={"samples": samples},
        level=samples,
    )


def full_context(now: StepContext) -> Alert | None:
    """TOOL02: conversations that end because the context is full."""
    share = now.row.get("rollout/context_full_frac", 0.0)
    if share < CONTEXT_FULL or not now.facts.generating_flag:
        return None
    turns = now.row.get("multi_turn/multi_turn_metric/round_number_mean")
    length = now.facts.config.rollout.rollout_max_context_len
    context = f"the context of {length} tokens" if length else "the model's context"
    after = f", after {turns:.1f} turns on average" if turns is not None else ""
    return now.alert(
        "TOOL02",
        f"{share:.0%} of the samples end because {context} is full{after}",
        evidence={"share": share, "context": length, "turns": turns},
        level=share,
    )
