"""Monitors of what was generated and scored: stopping, rewards, data, age of the policy, tools."""

from __future__ import annotations

import math
from pathlib import Path

from furlong.core.catalogue import Severity, diagnosis
from furlong.diagnosis.monitors.monitor import Found, Now, Row
from furlong.diagnosis.monitors.run_facts import Setting
from furlong.errors import ConfigError
from furlong.tools.template_test import ends_in_words

TRUNCATED, TRUNCATED_STEPS = 0.9, 2  # of the first rollouts; tight limits of healthy recipes cut 0.3 to 0.7
NO_SPREAD_STEPS = 3  # rollouts in a row; hard data may give one or two without a right answer
NO_SPREAD_SAMPLES = 64  # where groups say nothing; with one right in ten so many are equal once in 700 times
ENDED = 0.5  # of the first rollout's responses were cut off at most, so that stop tokens are right
LEFT = "The policy left what earned the reward: too large steps, or no pull to the reference."
SMALLER_STEPS = (
    "begin again, or go on from a checkpoint before that, with a lower --lr, or with --use-kl-loss --kl-loss-type k3 "
    "and a larger --kl-loss-coef"
)
COLLAPSE_OF, COLLAPSE_TO, COLLAPSE_ROWS = 0.2, 0.1, 5  # a mean reward above the first fell to the second part of it
FAILED_WARNING = 0.01  # of the samples; single timeouts of a verifier are told as an info
HELD_SHARE, HELD_LEAST_S = 0.5, 1.0  # of a rollout
DATA_SHARE, DATA_ROWS, DATA_LEAST_S = 0.2, 3, 0.005  # of a step, in each of so many
REWARD_SHARE, REWARD_ROWS, REWARD_LEAST_S = 0.5, 3, 1.0  # of a rollout, in each of so many
DATA_MEAN_S = 0.1  # or on average, if it is more than one pause of the process (garbage, a busy machine) makes
CONTEXT_FULL = 0.1  # of the samples


def truncation(now: Now) -> Found | None:
    """STOP02: the first responses are cut off."""
    ratio = now.row.get("rollout/truncated_ratio")
    setting = now.setting
    if ratio is None or ratio < TRUNCATED or now.step >= setting.first_step + TRUNCATED_STEPS:
        return None
    limit = setting.max_response_len
    what = f"at --rollout-max-response-len {limit}" if limit else "by the context"
    before = now.history[0].get("rollout/truncated_ratio", ratio) if now.history else ratio
    ends, other = _ends(setting)
    known = f"; {ends}" if ends else ""
    raised = "--rollout-max-response-len" if limit else "--rollout-max-context-len"
    cause, remedy = (
        None,
        (
            "name the model's end of turn with --rollout-stop-token-ids or --rollout-stop (a sample of "
            f"--debug-rollout-print-every 1 shows what the model writes there), or raise {raised}"
        ),
    )
    if other:
        cause = "The chat template ends a turn with another token than those that end a response."
        remedy = f"--rollout-stop-token-ids {' '.join(map(str, other))}; if responses then are cut off, raise {raised}"
    if before < ENDED:  # the same flags let responses end before the weights changed
        known, cause = f", {before:.0%} in the first step", LEFT
        remedy = SMALLER_STEPS
    return Found(
        diagnosis(
            "STOP02",
            f"step {now.step}: {ratio:.0%} of the responses were cut off {what}, without an end of turn{known}",
            cause=cause,
            remedy=remedy,
            evidence={
                "step": now.step,
                "truncated_ratio": ratio,
                "longest": now.row.get("rollout/response_len/max"),
                "max_response_len": limit,
            },
        )
    )


def _ends(setting: Setting) -> tuple[str, list[int]]:
    """What ends a response, in words, and ids that should, too; nothing where the model's folder is gone."""
    try:
        return ends_in_words(Path(setting.model), stop_token_ids=setting.stop_token_ids, stop=setting.stop_texts)
    except (ConfigError, OSError):
        return "", []


def rewards_without_spread(now: Now) -> Found | None:
    """REW02: rewards that tell samples apart no more, or that have collapsed."""
    reward = now.row.get("rollout/raw_reward")
    if reward is None or now.setting.loss_type == "sft_loss":
        return None
    run = _rows_without_spread(now)
    is_enough = _in_groups(now.row, now.setting) or run * now.setting.num_samples >= NO_SPREAD_SAMPLES
    if run >= NO_SPREAD_STEPS and is_enough:
        return _no_spread(now, reward, run)
    values = now.recent("rollout/raw_reward", 128)
    if len(values) < 3 * COLLAPSE_ROWS:
        return None
    means = [sum(values[i : i + COLLAPSE_ROWS]) / COLLAPSE_ROWS for i in range(len(values) - COLLAPSE_ROWS + 1)]
    best, last = max(means), means[-1]
    if best < COLLAPSE_OF or last > COLLAPSE_TO * best:
        return None
    return _fall(now, best, last, f"in means of {COLLAPSE_ROWS} steps")


def _fall(now: Now, best: float, last: float, how: str) -> Found:
    return Found(
        diagnosis(
            "REW02",
            f"step {now.step}: the mean reward fell from {best:.3g} to {last:.3g}, {how}",
            cause=LEFT,
            remedy=SMALLER_STEPS,
            evidence={"step": now.step, "best": best, "last": last},
        ),
        kind="fall",
    )


def _rows_without_spread(now: Now) -> int:
    """How many rows, this one and those before it, have no two different rewards to compare.

    They are compared in each group; over all of the rows where there is one sample a prompt, or no baseline of a group.
    """
    count, reward = 0, now.row["rollout/raw_reward"]
    for row in (now.row, *reversed(now.history)):
        if _in_groups(row, now.setting):
            is_flat = row.get("rollout/zero_std_frac", 0.0) >= 1
        else:
            is_flat = row.get("rollout/reward_range") == 0 and math.isclose(
                row.get("rollout/raw_reward", math.nan), reward
            )
        if not is_flat:
            break
        count += 1
    return count


def _in_groups(row: Row, setting: Setting) -> bool:
    """Whether a step compares the rewards of each group; a version without `reward_range` knew of nothing else."""
    of_groups = setting.compares_in_groups and "rollout/zero_std_frac" in row
    return of_groups or "rollout/reward_range" not in row


def _no_spread(now: Now, reward: float, rows: int) -> Found:
    setting, grouped = now.setting, _in_groups(now.row, now.setting)
    best = max((row.get("rollout/raw_reward", 0.0) for row in now.history), default=0.0)
    is_same = now.row.get("rollout/reward_range", 0.0) == 0
    if is_same and reward == 0 and best >= COLLAPSE_OF:
        return _fall(now, best, reward, f"where it has been for {rows} steps: nothing is learned any more")
    told = is_same and (reward in (0.0, 1.0) or not grouped)
    seen = f"every reward is {reward:.3g}" if told else "all samples of each group score the same"
    cause, way = _why_no_spread(setting, grouped, reward if told else None)
    if grouped and not is_same:  # so the verifier does find right and wrong answers
        cause = "Each prompt gets the same answer every time, or all prompts are too easy or too hard."
        way = "raise --rollout-temperature (--entropy-coef keeps the policy from becoming certain) or "
        way += "--n-samples-per-prompt, or use prompts that are right at times"
    return Found(
        diagnosis(
            "REW02",
            f"step {now.step}: {seen} for {rows} steps in a row, so nothing is learned",
            cause=cause,
            remedy=way,
            evidence={"step": now.step, "raw_reward": reward, "steps": rows, "label_key": setting.label_key},
        ),
        rows,
        seen,
    )


def _why_no_spread(setting: Setting, grouped: bool, every: float | None) -> tuple[str | None, str]:
    """The cause (None: the row's) and the way out. `every` is the reward that all samples have, if that is known."""
    look = "on a sample of --debug-rollout-print-every 1, and with `furlong reward test` and the same flags"
    if every == 0:
        labels = f"The verifier never finds an answer that matches the label (--label-key {setting.label_key})"
        cause = labels if setting.label_key else "The reward function never pays"
        easier = "a larger --n-samples-per-prompt" if grouped else "easier prompts"
        check = f"check --label-key and the form of answer that the reward wants, {look}"
        return f"{cause}, or the task is too hard.", f"{check}; for a task that is too hard, {easier}"
    if every == 1:
        drop = ", or a --dynamic-sampling-filter-path that drops such groups" if grouped else ""
        return (
            "The task is solved, or the reward function says yes to everything.",
            f"use harder data{drop}; check the reward function",
        )
    if grouped:
        return None, "raise --n-samples-per-prompt, or check the reward function with --debug-rollout-print-every 1"
    return "The reward function gives the same for whatever is answered.", f"check the reward function {look}"


def failed_rewards(now: Now) -> Found | None:
    """REW03: reward calls that failed or timed out; they are counted, never averaged."""
    failed = now.row.get("rollout/reward_failed", 0.0)
    timed_out = now.row.get("rollout/reward_timed_out", 0.0)
    count = failed + timed_out
    if not count:
        return None
    share = count / max(now.setting.num_samples, 1)
    severity: Severity = "warning" if share >= FAILED_WARNING else "info"
    return Found(
        diagnosis(
            "REW03",
            f"step {now.step}: {count:.0f} of about {now.setting.num_samples} reward calls gave no reward "
            f"({failed:.0f} failed, {timed_out:.0f} timed out); those samples are left out, not counted as 0",
            cause="The function or its server raised or did not answer in time; the log has the first reasons.",
            remedy="mend the function; `furlong reward test` with the same flags tries it on rows of the data"
            if failed >= timed_out
            else "raise --reward-timeout, --num-reward-workers, or make the function faster",
            severity=severity,
            evidence={"step": now.step, "failed": failed, "timed_out": timed_out, "share": share},
        ),
        share,
    )


def failed_generation(now: Now) -> Found | None:
    """HOOK01: samples that a custom generate function did not make, because it raised or took too long."""
    failed = now.row.get("rollout/generate_failed", 0.0)
    timed_out = now.row.get("rollout/generate_timed_out", 0.0)
    count = failed + timed_out
    if not count:
        return None
    share = count / max(now.setting.num_samples, 1)
    slow = "raise --generate-timeout, or make what it waits for faster"
    return Found(
        diagnosis(
            "HOOK01",
            f"step {now.step}: {count:.0f} of about {now.setting.num_samples} samples were not generated "
            f"({failed:.0f} failed, {timed_out:.0f} timed out); they are left out of the batch",
            cause="--custom-generate-function-path raised, or what it asks did not answer in time; the log has the "
            "first reasons."
            if now.setting.has_custom_generation
            else "Responses took longer than --generate-timeout.",
            remedy="mend what the log says (`grep 'generate function failed' run.log`)"
            if failed >= timed_out
            else slow,
            severity="warning" if share >= FAILED_WARNING else "info",
            evidence={"step": now.step, "failed": failed, "timed_out": timed_out, "share": share},
        ),
        share,
    )


def held_by_a_function(now: Now) -> Found | None:
    """HOOK02: the share of a rollout in which a generate function let nothing else go on."""
    held, whole = now.row.get("perf/generate_held_time", 0.0), now.row.get("perf/rollout_time", 0.0)
    if held < HELD_LEAST_S or held < HELD_SHARE * whole:
        return None
    share = min(held / whole, 1.0)
    return Found(
        diagnosis(
            "HOOK02",
            f"step {now.step}: --custom-generate-function-path ran {held:.3g} s of the rollout's {whole:.3g} s "
            f"({share:.0%}) without awaiting anything; neither other samples nor requests went on meanwhile",
            remedy="an asynchronous library where it asks a server (httpx.AsyncClient in place of requests), "
            "`await asyncio.sleep` in place of time.sleep, `await asyncio.to_thread(function, ...)` for the rest",
            evidence={"step": now.step, "held_s": held, "rollout_s": whole},
        ),
        share,
    )


def waiting_for_rewards(now: Now) -> Found | None:
    """REW04: rollouts in most of which nothing is generated and rewards are waited for."""
    reward_s = now.recent("perf/reward_wait_time", REWARD_ROWS)
    rollout_s = now.recent("perf/rollout_time", REWARD_ROWS)
    waited = now.row.get("perf/wait_time_ratio", 0.0)
    if len(reward_s) < REWARD_ROWS or len(rollout_s) < REWARD_ROWS or waited < DATA_SHARE:
        return None
    if any(s < max(REWARD_SHARE * whole, REWARD_LEAST_S) for s, whole in zip(reward_s, rollout_s, strict=True)):
        return None
    seconds, whole = sum(reward_s) / len(reward_s), sum(rollout_s) / len(rollout_s)
    timed_out = now.row.get("rollout/reward_timed_out", 0.0)
    return Found(
        diagnosis(
            "REW04",
            f"step {now.step}: nothing was generated in {seconds:.3g} s of a rollout's {whole:.3g} s "
            f"({seconds / whole:.0%}, the mean of {REWARD_ROWS} steps), while rewards were waited for",
            remedy="; ".join(_quicker_rewards(now.setting, timed_out)),
            evidence={"step": now.step, "reward_wait_s": seconds, "rollout_s": whole, "timed_out": timed_out},
        ),
        seconds / whole,
    )


def _quicker_rewards(setting: Setting, timed_out: float) -> list[str]:
    """What makes rewards take less of a rollout, the likeliest first."""
    ways: list[str] = []
    if timed_out:
        limit = f"a lower --reward-timeout (it is {setting.reward_timeout:g} s)"
        ways.append(f"{limit} where calls do not end: {timed_out:.0f} of this step took all of it")
    if setting.asks_reward_server:
        ways.append("a faster server at --rm-url, or several behind that address")
    else:
        more = f"more --num-reward-workers (it is {setting.num_reward_workers}), up to the CPUs that are free"
        ways.append(f"{more}, if it computes" if setting.has_custom_reward else more)
    if setting.has_custom_reward:
        ways.append(
            "if it waits for a server or a process, an `async def` function, of which each worker has many calls open "
            "at a time; of a plain one it has one"
        )
    if setting.may_run_ahead:
        ways.append("--async-buffer-size 1, with which a rollout is scored while the one before it is trained")
    return ways


def waiting_for_data(now: Now) -> Found | None:
    """DATA03: the share of a step that reads prompts."""
    data_s, step_s = now.recent("perf/data_time", DATA_ROWS), now.recent("perf/step_time", DATA_ROWS)
    waited = now.row.get("perf/wait_time_ratio", 0.0)
    if len(data_s) < DATA_ROWS or len(step_s) < DATA_ROWS or waited < DATA_SHARE:
        return None
    share, mean_s = sum(data_s) / sum(step_s), sum(data_s) / len(data_s)
    is_steady = all(d >= max(DATA_SHARE * s, DATA_LEAST_S) for d, s in zip(data_s, step_s, strict=True))
    if share < DATA_SHARE or not (is_steady or mean_s >= DATA_MEAN_S):
        return None
    workers = now.setting.num_data_workers
    return Found(
        diagnosis(
            "DATA03",
            f"step {now.step}: reading prompts takes {mean_s:.3g} s, {share:.0%} of a step "
            f"(--num-data-workers {workers})",
            remedy=f"--num-data-workers {max(2 * workers, 4)}; --streaming-data, or `furlong data tokenize` "
            "beforehand; make a data source of your own faster",
            evidence={"step": now.step, "data_s": mean_s, "share": share, "num_data_workers": workers},
        ),
        share,
    )


def age_of_policy(now: Now) -> Found | None:
    """ASYNC01: weight versions of the trained tokens against the bound that the flags promise."""
    oldest, mean = now.row.get("rollout/staleness/max"), now.row.get("rollout/staleness/mean")
    bound = now.setting.max_staleness
    if oldest is None or mean is None:
        return None
    # Partial rollouts carry tokens over; then the bound is one of the mean.
    age = mean if now.setting.is_partial else oldest
    if age <= bound + (1 if now.setting.is_partial else 0):
        return None
    return Found(
        diagnosis(
            "ASYNC01",
            f"step {now.step}: samples are {oldest:.0f} rollouts old at most and {mean:.2g} on average; the flags "
            f"promise {bound}",
            remedy=(
                f"lower --over-sampling-batch-size (it is {now.setting.over_sampling}): what a rollout has no room for "
                "is trained on later; "
                if now.setting.is_partial and now.setting.over_sampling
                else ""
            )
            + "lower --async-buffer-size, set --update-weights-interval 1, or leave old tokens out of the loss with "
            "--mask-offpolicy-in-partial-rollout",
            evidence={"step": now.step, "max": oldest, "mean": mean, "bound": bound},
        ),
        age,
    )


def tool_output(now: Now) -> Found | None:
    """TOOL01: tokens in the loss that no engine sampled."""
    samples = now.row.get("rollout/env_tokens_in_loss", 0.0)
    if not samples:
        return None
    return Found(
        diagnosis(
            "TOOL01",
            f"step {now.step}: {samples:.0f} samples train on tokens that the policy did not sample",
            remedy="append what the environment says with append_response_tokens(..., trainable=False), which masks "
            "it, or set zeros for it in sample.loss_mask",
            evidence={"step": now.step, "samples": samples},
        ),
        samples,
    )


def full_context(now: Now) -> Found | None:
    """TOOL02: conversations that end because the context is full."""
    share = now.row.get("rollout/context_full_frac", 0.0)
    if share < CONTEXT_FULL or not now.setting.has_custom_generation:
        return None
    turns = now.row.get("multi_turn/multi_turn_metric/round_number_mean")
    length = now.setting.max_context_len
    context = f"the context of {length} tokens" if length else "the model's context"
    when = f", after {turns:.1f} turns on average" if turns is not None else ""
    return Found(
        diagnosis(
            "TOOL02",
            f"step {now.step}: {share:.0%} of the samples end because {context} is full{when}",
            remedy="keep fewer turns in the generate function, or raise --rollout-max-context-len (and "
            "--sglang-context-length, where that is given)",
            evidence={"step": now.step, "share": share, "context": now.setting.max_context_len, "turns": turns},
        ),
        share,
    )
