"""Monitors of rollouts: truncation, rewards, user functions, data loading, staleness and tools."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from furlong.config.checks.value_checks import BOXED
from furlong.config.facts import max_staleness
from furlong.config.sections import Config
from furlong.core.algorithms import ALGORITHMS
from furlong.core.text import abbreviate
from furlong.diagnosis.monitors.monitor import HISTORY, Alert, Row, RunFacts, StepContext, StepMonitor
from furlong.errors import ConfigError
from furlong.tools.template_test import describe_ends

TRUNCATED, TRUNCATED_SAMPLES = 0.9, 32  # share of the first samples; tight limits of healthy recipes truncate 0.3-0.7
WARM = 0.5  # a temperature at which responses differ, unless the policy is certain
HOT = 1.5  # a temperature at which few tokens are those that the model would choose
EARNS = 0.75  # times the reward before, from which on longer responses cost nothing
SHORT_ANSWER = 4  # a limit below which answers that get rewards need no end of turn, as of classifiers
ENDED, BROKEN_ROWS, BROKEN_SAMPLES = 0.3, 3, 96  # share cut off at first; later steps in a row, and their samples
NO_SPREAD_STEPS, NO_SPREAD_SAMPLES = 3, 64  # in a row; at 10 % right answers, 64 are equal once in 700 times
COLLAPSE_OF, COLLAPSE_TO, COLLAPSE_ROWS = 0.2, 0.1, 5  # a mean reward above the first fell to this part of it
COLLAPSE_SUM = 20.0  # rewards of 1 in a mean: 2 where 10 are usual happens once in 360 times
FAILED_AGENTS = 0.5  # of the samples
FAILED_WARNING = 0.01  # of the samples; below it the severity is info: a verifier may time out once
BLOCKED_SHARE, BLOCKED_LEAST_S = 0.5, 1.0  # of a rollout, and at least
WAITED = 0.2  # of a step, that training waits for rollouts: below it nothing is gained
STILL_ROWS = 8  # steps in a row that change nothing although rewards differ
SLOWER, SLOW_ROWS, USUAL_ROWS, SLOW_LEAST_S = 3.0, 3, 5, 1.0  # times the usual, for these steps, after at least those
DATA_SHARE, DATA_LEAST_S, DATA_ROWS = 0.2, 0.1, 3  # of these steps together, and at least on average
HACKS, HACK_SHARE = 8, 0.9  # suspicious samples with the highest reward, and their share of the suspicious ones
REWARD_SHARE, REWARD_LEAST_S, REWARD_ROWS = 0.5, 1.0, 3  # of a rollout, in each of these steps, and at least
CONTEXT_FULL = 0.1  # of the samples
LIMITED = "rollout/episodes/limit/"  # number of episodes that ended at this limit
TOKEN_RATE = "perf/tokens_per_gpu_per_sec"
SPEEDS = {TOKEN_RATE, "perf/longest_sample_tokens_per_sec"}
SAME_RESPONSES = 0.9  # of the groups
DECAYED = 1e-2  # of the weights, in each step, from which on weight decay may be what breaks a policy
# Findings that may be why rewards carry no signal.
EXPLAINING = [
    "DATA01", "DATA02", "TPL01", "TPL02", "TPL03", "STOP01", "STOP02", "REW01", "REW03", "HOOK01", "TOOL01", "TOOL02",
    "NUM02",
]  # fmt: skip


def truncation(now: StepContext) -> Alert | None:
    """STOP02: the first responses are cut off, or all of them for many steps after those of the first step ended."""
    facts, rollout = now.facts, now.facts.config.rollout
    ratios = now.recent("rollout/truncated_ratio", HISTORY)
    ratio, limit = now.row.get("rollout/truncated_ratio", 0.0), rollout.rollout_max_response_len
    if facts.generating_flag:  # TOOL02
        ratio -= now.row.get("rollout/context_full_frac", 0.0)
        limited = [n for name, n in now.row.items() if name.startswith(LIMITED) and name != f"{LIMITED}context"]
        ratio -= sum(limited) / (facts.num_samples or math.inf)
    if ratio < TRUNCATED or now.reported("TPL03"):
        return None
    if limit is not None and limit < SHORT_ANSWER and now.row.get("rollout/reward_range", 0.0) > 0:
        return None
    rows = next((i for i, each in enumerate(reversed(ratios)) if each < TRUNCATED), len(ratios))
    has_ended = rows < len(ratios)
    if has_ended and any(
        "best" in each["evidence"] for each in now.events.get("diagnosis", ()) if each["id"] == "REW02"
    ):
        return None  # the fall of the reward was reported
    samples = BROKEN_SAMPLES if has_ended else TRUNCATED_SAMPLES
    least = max(math.ceil(samples / (facts.num_samples or math.inf)), BROKEN_ROWS if has_ended else 1)
    is_early = now.step < facts.first_step + max(least, 2)
    if rows < least or (ratios[0] > ENDED if has_ended else not is_early):
        return None
    place = f"at --rollout-max-response-len {limit}" if limit else "by the context limit"
    finding = f"{ratio:.0%} of the responses were cut off {place}, without an end of turn"
    evidence: dict[str, object] = {
        "truncated_ratio": ratio,
        "longest": now.row.get("rollout/response_len/max"),
        "max_response_len": limit,
    }
    if has_ended:  # with the same flags, responses ended before the weights changed
        finding += f" ({ratios[0]:.0%} in the first step)"
        cause, remedy = _broken(facts.config)
        rewards = now.recent("rollout/raw_reward", HISTORY)
        if len(rewards) > rows:
            before = statistics.fmean(rewards[:-rows])
            evidence |= {"reward_before": before, "reward": rewards[-1]}
            finding += f"; the mean reward is {rewards[-1]:.3g}, before it was {before:.3g}"
            if before > 0 and statistics.fmean(rewards[-rows:]) > EARNS * before:
                cause = f"The reward does not ask for an end: without one, responses get as much as before. {cause}"
                remedy = f"give less to responses without an end, or raise --rollout-max-response-len; {remedy}"
        return now.alert("STOP02", finding, cause=cause, remedy=remedy, evidence=evidence, kind="broken")
    raised = "--rollout-max-response-len" if limit else "--rollout-max-context-len"
    ends, missing = _end_tokens(facts)
    cause = "Candidates: the limit is below what answers need, or the model ends its turns with another token."
    remedy = (
        f"print a sample with --debug-rollout-print-every 1; raise {raised}, or set the model's end of turn with "
        "--rollout-stop-token-ids or --rollout-stop"
    )
    if limit and rollout.rollout_min_new_tokens >= limit:
        cause = f"--rollout-min-new-tokens {rollout.rollout_min_new_tokens} leaves no room for an end of turn."
        remedy = f"lower --rollout-min-new-tokens, or raise {raised}"
    elif rollout.rollout_temperature > HOT:
        cause, remedy = _hot(facts.config)
    elif missing:
        cause = "The chat template ends a turn with a token that does not stop generation."
        ids = " ".join(map(str, missing))
        remedy = f"add --rollout-stop-token-ids {ids}; if responses are still cut off, raise {raised}"
    return now.alert("STOP02", finding + (f"; {ends}" if ends else ""), cause=cause, remedy=remedy, evidence=evidence)


def _hot(config: Config) -> tuple[str, str]:
    cause = f"At --rollout-temperature {config.rollout.rollout_temperature:g} tokens are nearly random."
    return cause, "use a --rollout-temperature of about 1"


def _end_tokens(facts: RunFacts) -> tuple[str, list[int]]:
    rollout = facts.config.rollout
    stop_ids, stop = rollout.rollout_stop_token_ids or (), rollout.rollout_stop or ()
    try:
        return describe_ends(Path(facts.model), stop_token_ids=stop_ids, stop=stop)
    except (ConfigError, OSError):
        return "", []


def rewards_without_spread(now: StepContext) -> Alert | None:
    """REW02: rewards no longer distinguish samples, or have collapsed; not if responses do not end (STOP02)."""
    reward, facts = now.row.get("rollout/raw_reward"), now.facts
    if reward is None or facts.config.algo.loss_type == "sft_loss" or truncation(now) is not None:
        return None
    if now.row.get("rollout/truncated_ratio", 0.0) >= TRUNCATED and now.reported("STOP02"):
        return None
    rows, size = _rows_without_spread(now, reward), facts.num_samples or math.inf
    if rows >= NO_SPREAD_STEPS and rows * size >= NO_SPREAD_SAMPLES:
        return None if facts.config.opd.use_opd else _no_spread(now, reward, rows)  # a teacher is a signal, too
    values = now.recent("rollout/raw_reward", HISTORY)
    best = max(_means(values, COLLAPSE_ROWS), default=0.0)
    if best < COLLAPSE_OF:
        return None
    window = max(COLLAPSE_ROWS, math.ceil(COLLAPSE_SUM / (best * size)))  # more steps where they have few samples
    means = _means(values, window)
    if len(values) < 3 * window or max(means) < COLLAPSE_OF or means[-1] > COLLAPSE_TO * max(means):
        return None
    return _collapse(now, max(means), means[-1], f"averaged over {window} steps")


def _broken(config: Config, *, is_early: bool = False) -> tuple[str, str]:
    algo, flags = config.algo, config.optim
    decay, functions = flags.lr * flags.weight_decay, _custom_functions(config, filters=True)
    suspects = {
        f"--entropy-coef {algo.entropy_coef:g} (0.001 is common)": algo.entropy_coef > 0,
        f"--kl-loss-coef {algo.kl_loss_coef:g} (0.001 to 0.1 are common)": algo.use_kl_loss and algo.kl_loss_coef > 0.1,
        f"--weight-decay {flags.weight_decay:g}, which shrinks weights by {decay:.2%} per step": decay > DECAYED,
        f"what {functions} does (its sign, its scale, which samples it removes)": functions,
    }
    named = [name for name, is_set in suspects.items() if is_set]
    candidates = [*named, f"steps that are too large (--lr {flags.lr:g})", *(["prompts that became harder"] * is_early)]
    remedy = "resume from a checkpoint before that, or restart"
    remedy += f" and check {'; '.join(named)}; or lower --lr" if named else ", with a lower --lr"
    return f"Training may have broken the policy. Candidates: {'; '.join(candidates)}.", remedy


def _custom_functions(config: Config, *, filters: bool = False) -> str:
    algo, rollout = config.algo, config.rollout
    paths = {
        "--custom-loss-function-path": algo.custom_loss_function_path,
        "--custom-pg-loss-reducer-function-path": algo.custom_pg_loss_reducer_function_path,
        "--custom-advantage-function-path": algo.custom_advantage_function_path,
        "--custom-reward-post-process-path": config.reward.custom_reward_post_process_path,
        "--custom-convert-samples-to-train-data-path": rollout.custom_convert_samples_to_train_data_path,
        "--rollout-data-postprocess-path": rollout.rollout_data_postprocess_path,
        "--rollout-sample-filter-path": filters and rollout.rollout_sample_filter_path,
        "--dynamic-sampling-filter-path": filters and rollout.dynamic_sampling_filter_path,
    }
    return " and ".join(flag for flag, path in paths.items() if path)


def _means(values: Sequence[float], size: int) -> list[float]:
    return [sum(values[i : i + size]) / size for i in range(len(values) - size + 1)]


def _collapse(now: StepContext, best: float, last: float, note: str) -> Alert:
    finding = f"the mean reward fell from {best:.3g} to {last:.3g}, {note}"
    cause, remedy = _broken(now.facts.config, is_early=len(now.history) < 3 * COLLAPSE_ROWS)
    return now.alert("REW02", finding, cause=cause, remedy=remedy, evidence={"best": best, "last": last}, kind="fall")


def _compares_in_groups(row: Row, facts: RunFacts) -> bool:
    algo = facts.config.algo
    row_of = ALGORITHMS.get(algo.advantage_estimator)  # None for one that this process does not know
    in_groups = algo.rewards_normalization and (row_of is None or row_of.baseline != "none")
    return (in_groups and "rollout/zero_std_frac" in row) or "rollout/reward_range" not in row


def _rows_without_spread(now: StepContext, reward: float) -> int:
    """Count the rows in a row, ending with this one, in which no two comparable rewards differ.

    Rewards are compared within groups; across the rows if there is one sample per prompt or no group baseline.
    """
    count = 0
    for row in (now.row, *reversed(now.history)):
        if _compares_in_groups(row, now.facts):
            is_flat = row.get("rollout/zero_std_frac", 0.0) >= 1
        else:
            is_flat = row["rollout/reward_range"] == 0 and row.get("rollout/raw_reward") == reward
        if not is_flat:
            break
        count += 1
    return count


def _no_spread(now: StepContext, reward: float, rows: int) -> Alert:
    facts, in_groups = now.facts, _compares_in_groups(now.row, now.facts)
    before = [row["rollout/raw_reward"] for row in now.history if "rollout/raw_reward" in row][: 1 - rows]
    best = max(_means(before, min(len(before), COLLAPSE_ROWS)), default=0.0) if before else 0.0
    is_same, num_samples = now.row.get("rollout/reward_range", 0.0) == 0, facts.num_samples or math.inf
    if is_same and reward == 0 and best >= COLLAPSE_OF and best * rows * num_samples >= COLLAPSE_SUM:
        return _collapse(now, best, reward, f"and stayed there for {rows} steps: there is no learning signal")
    is_known = is_same and (reward in (0.0, 1.0) or "rollout/reward_range" in now.row)
    pattern = f"every reward is {reward:.3g}" if is_known else "all samples of each group score the same"
    example = "".join(
        f"; one of them: prompt {event['prompt']}, response {event['response']}, label {event['label']}"
        for event in [*now.events.get("equal_rewards", ())][-1:]
        if is_known
    )
    cause, remedy = _cause_of_equal_rewards(now, reward)
    rollout, source, label_key = facts.config.rollout, facts.config.data.data_source_path, facts.config.data.label_key
    if in_groups and not is_known and now.row.get("rollout/same_response_frac", 0.0) >= SAME_RESPONSES:
        is_cold = rollout.rollout_temperature < WARM
        generating = facts.generating_flag
        cases = [
            (is_cold, f"--rollout-temperature {rollout.rollout_temperature:g}", "raise --rollout-temperature"),
            (generating, f"{generating}, which may not pass on `sampling_params`", f"correct {generating}"),
            (source, f"one seed for all of them in --data-source-path {source}", "leave Sample.seed unset there"),
            (not is_cold, "a policy that is certain of its answers", "use harder data, or lower --lr"),
        ]  # fmt: skip
        named = [each for each in cases if each[0]]
        cause = f"All samples of a prompt have the same response. Candidates: {'; '.join(each[1] for each in named)}."
        remedy = "; ".join(each[2] for each in named)
    elif in_groups and not is_known:  # the verifier does distinguish right and wrong answers
        cause = (
            "Responses to a prompt differ, their rewards do not. Candidates: a reward that depends on the prompt only "
            "(a cache, a value for the whole group), or prompts that are answered always or never."
        )
        remedy = (
            "compare the samples of a prompt in `furlong view`; correct the reward, or raise --n-samples-per-prompt "
            "and use prompts that are sometimes answered right"
        )
    elif known := " and ".join(now.reported(*EXPLAINING)):
        cause, remedy = f"A likely reason is what {known} reported before.", f"fix that first (see {known} above)"
    elif is_known and rollout.rollout_temperature > HOT:
        hot, cooler = _hot(facts.config)
        cause, remedy = f"{hot} {cause}", f"{cooler}; {remedy}"
    elif reward == 0 and max(before, default=0.0) >= COLLAPSE_OF:  # it was not always so
        cause, remedy = _broken(facts.config)
        cause += " Or answers are rarely right: hard prompts, or labels of other rows."
        remedy = f"print samples with --debug-rollout-print-every 1, and check their labels; {remedy}"
    return now.alert(
        "REW02",
        f"{pattern} for {rows} steps in a row, so there is no learning signal{example}",
        cause=cause,
        remedy=remedy,
        evidence={"raw_reward": reward, "steps": rows, "label_key": label_key},
        level=rows,
        kind=pattern,
    )


def _cause_of_equal_rewards(now: StepContext, reward: float) -> tuple[str, str]:
    facts, scorer, label_key = now.facts, now.facts.config.reward, now.facts.config.data.label_key
    named = f" (--label-key {label_key})" if label_key else " (--label-key is not set)"
    source, test = "the reward function", ", and try `furlong reward test` with the same flags"
    if not (scorer.custom_rm_path or scorer.rm_type) and facts.generating_flag:
        source, test = facts.generating_flag, ""
    cause = f"Candidates: {source} gives the same reward to any answer"
    remedy = f"print samples with --debug-rollout-print-every 1{test}; check {source}"
    if reward == 0:
        cause += (
            f", it does not find the labels{named} or they are those of other rows, the responses are no answers "
            "(damaged weights, another tokenizer, a chat format that the model does not know, prompts without the "
            "question), or the task is out of reach"
        )
        remedy += f", the labels{named}, the answer format and the prompts; use easier data if they are right"
    elif reward == 1:
        cause += ", or the task is solved"
        remedy += "; use harder data if it is solved"
    return f"{cause}.", remedy


def failed_rewards(now: StepContext) -> Alert | None:
    """REW03: reward calls that failed or timed out; they are counted, not averaged."""
    return _failed_calls(
        now,
        "REW03",
        "reward",
        "reward calls gave no reward",
        "those samples are left out, not counted as 0",
        "",
        "fix what the reasons name; `furlong reward test` with the same flags scores rows of the data",
        "correct what does not return; if it is only slow, raise --reward-timeout or --num-reward-workers",
    )


def failed_generation(now: StepContext) -> Alert | None:
    """HOOK01: samples that were not generated as a custom function raised or took too long; agents that mostly fail."""
    flag = now.facts.generating_flag
    scored = now.row.get("rollout/episodes/agent_error", 0.0) - now.row.get("rollout/generate_failed", 0.0)
    scored -= now.row.get("rollout/generate_timed_out", 0.0) + now.row.get(f"{LIMITED}tool_time", 0.0)
    if scored >= FAILED_AGENTS * (now.facts.num_samples or math.inf):
        return now.alert(
            "HOOK01",
            f"{scored:.0f} of about {now.facts.num_samples} agents failed after the policy had answered"
            f"{_reasons(now, 'generate')}; their episodes are scored, without a reward function with 0",
            cause=f"{flag} raised, or something that it calls.",
            remedy="fix these errors",
            evidence={"failed": scored},
            level=scored,
            kind="scored",
        )
    return _failed_calls(
        now,
        "HOOK01",
        "generate",
        "samples were not generated",
        "they are left out of the batch",
        f"{flag} raised, or waited too long for something."
        if flag
        else "Responses took longer than --generate-timeout.",
        "fix the error in the log (`grep 'generate function failed' run.log`)",
        "raise --generate-timeout, or make what the function waits for faster",
    )


def _failed_calls(
    now: StepContext, id: str, stage: str, what: str, then: str, cause: str, if_failed: str, if_late: str
) -> Alert | None:
    failed = now.row.get(f"rollout/{stage}_failed", 0.0)
    timed_out = now.row.get(f"rollout/{stage}_timed_out", 0.0)
    num_samples = now.facts.num_samples
    if stage == "reward":  # the counts include groups that were dropped because each sample failed
        dropped = now.row.get("rollout/dynamic_filter/drop_all_failed", 0.0)
        num_samples += int(dropped) * now.facts.config.data.n_samples_per_prompt
    share = (failed + timed_out) / max(num_samples, 1)
    if stage == "generate":
        failed -= now.row.get("rollout/episodes/silent", 0.0)  # AGT07
    if not failed + timed_out:
        return None
    return now.alert(
        id,
        f"{failed + timed_out:.0f} of about {num_samples} {what} ({failed:.0f} failed, {timed_out:.0f} timed "
        f"out{_reasons(now, stage)}); {then}",
        cause=cause,
        remedy=if_failed if failed >= timed_out else if_late,
        severity="warning" if share >= FAILED_WARNING else "info",
        evidence={"failed": failed, "timed_out": timed_out, "share": share},
        level=share,
    )


def _reasons(now: StepContext, stage: str) -> str:
    failed = [e["reason"].partition("\n")[0] for e in now.events.get("sample_failed", ()) if e["stage"] == stage]
    return f"; first: {abbreviate([*dict.fromkeys(failed)], 2, separator='; ')}" if failed else ""


def blocking(now: StepContext) -> Alert | None:
    """HOOK02 or AGT05: the share of a rollout during which user code blocked the event loop."""
    environment = now.facts.config.session.environment
    id, what = "HOOK02", now.facts.generating_flag or "--custom-generate-function-path"
    if environment:
        id, what = "AGT05", f"--environment {environment[0]}"
    blocked, whole = now.row.get("perf/generate_held_time", 0.0), now.row.get("perf/rollout_time", 0.0)
    if blocked < BLOCKED_LEAST_S or blocked < BLOCKED_SHARE * whole:
        return None
    share = min(blocked / whole, 1.0)
    return now.alert(
        id,
        f"{what} blocked the event loop for {blocked:.3g} s of the rollout's {whole:.3g} s ({share:.0%}); other "
        "samples and requests waited",
        evidence={"held_s": blocked, "rollout_s": whole},
        level=share,
    )


def reward_wait(now: StepContext) -> Alert | None:
    """REW04: most of each rollout passes without generation, waiting for rewards."""
    waits = now.recent("perf/reward_wait_time", REWARD_ROWS)
    wholes = now.recent("perf/rollout_time", REWARD_ROWS)
    if now.row.get("perf/wait_time_ratio", 0.0) < WAITED or min(len(waits), len(wholes)) < REWARD_ROWS:
        return None
    if any(s < max(REWARD_SHARE * whole, REWARD_LEAST_S) for s, whole in zip(waits, wholes, strict=True)):
        return None
    seconds, whole = sum(waits) / REWARD_ROWS, sum(wholes) / REWARD_ROWS
    timed_out, reward = now.row.get("rollout/reward_timed_out", 0.0), now.facts.config.reward
    is_remote = reward.custom_rm_path is None and (reward.rm_type or "").removeprefix(BOXED) == "remote_rm"
    remedy = "use a faster server at --rm-url, or several behind that address"
    if not is_remote:
        remedy = (
            f"raise --num-reward-workers (now {reward.num_reward_workers}), up to the number of free CPUs, if the "
            "function computes; make it an `async def` function that awaits, without calls such as time.sleep, "
            "if it waits for a server or a process"
        )
    return now.alert(
        "REW04",
        f"for {seconds:.3g} s of a rollout's {whole:.3g} s ({seconds / whole:.0%}, mean of {REWARD_ROWS} steps) "
        "nothing was generated and rewards were awaited",
        remedy=f"{remedy}; lower --reward-timeout if calls hang ({timed_out:.0f} of this step timed out); without "
        "--colocate, --async-buffer-size 1 scores a rollout while the previous one is trained on",
        evidence={"reward_wait_s": seconds, "rollout_s": whole, "timed_out": timed_out},
        level=seconds / whole,
    )


def without_effect(now: StepContext) -> Alert | None:
    """NUM06: training changes nothing, although rewards differ."""
    config = now.facts.config
    rows = [*now.history, now.row][-STILL_ROWS:]
    if len(rows) < STILL_ROWS or not any(_differs(row, config) for row in rows):
        return None
    if now.step - STILL_ROWS < config.algo.num_critic_only_steps:  # the policy was not trained in all of them
        return None
    updates = [*now.events.get("weights_compared", ())][-STILL_ROWS:]
    has_no_gradient = all(row.get("train/grad_norm") == 0 and _differs(row, config) for row in rows)
    if not has_no_gradient and (len(updates) < STILL_ROWS or any(each.get("changed") for each in updates)):
        return None
    stale, trained = now.row.get("rollout/staleness/masked_frac"), now.row.get("rollout/response_len/mean")
    optim, functions = config.optim, _custom_functions(config)
    cases = (
        (optim.lr == 0, "--lr is 0.",
         "set --lr, on the command line or in the file that sets it (config.json shows it)"),
        (now.row.get("train/lr-pg_0") == 0, "The schedule's learning rate is 0.",
         "check --lr-warmup-iters, --lr-decay-iters and --min-lr"),
        (stale == 1, "All tokens are older than --max-token-staleness, and --stale-tokens mask leaves them out of the "
         "loss.", "raise --max-token-staleness, or use --stale-tokens pace"),
        (trained == 0, "The loss mask of every token is 0.",
         "check the loss masks of custom functions, --mask-truncated and --rollout-sample-filter-path"),
        (has_no_gradient and functions, f"{functions} returns a constant, zeros or tensors without gradient.",
         f"correct what {functions} returns"),
        (has_no_gradient, "Advantages or loss masks are 0, or the loss does not depend on the weights.",
         "look at the advantages with --save-debug-train-data, and at what --rollout-sample-filter-path removes"),
        (True, f"Steps are below the precision of the weights: --lr {optim.lr:g} is too small, or a flag reduces it.",
         "raise --lr; check its schedule, --adam-eps (1e-8) and --clip-grad (1)"),
    )  # fmt: skip
    cause, remedy = next((cause, remedy) for applies, cause, remedy in cases if applies)
    what = "grad_norm is 0" if has_no_gradient else "weight updates change no tensor"
    return now.alert(
        "NUM06",
        f"{what} for {STILL_ROWS} steps in a row, although the data should give a gradient: nothing is learned",
        cause=cause,
        remedy=remedy,
        evidence={"grad_norm": now.row.get("train/grad_norm"), "masked_frac": stale, "trained_tokens": trained},
    )


def _differs(row: Row, config: Config) -> bool:
    """Whether the rewards of a step give a gradient; demonstrations always do."""
    if config.algo.loss_type == "sft_loss":
        return True
    return row.get("rollout/zero_std_frac", 0.0) < 1 and row.get("rollout/reward_range", 0.0) > 0


def slow_generation(now: StepContext) -> Alert | None:
    """SLOW01: rollouts take several times as long as before, for each token, too."""
    if now.facts.config.rollout.dynamic_sampling_filter_path:  # which may need more and more groups
        return None
    rows = [row for row in (*now.history, now.row) if {"perf/rollout_time", *SPEEDS} <= row.keys()]
    before, last = rows[:-SLOW_ROWS], rows[-SLOW_ROWS:]
    if len(before) < USUAL_ROWS:
        return None
    usual = {name: statistics.median(row[name] for row in before) for name in SPEEDS}
    usual_s = statistics.median(map(_generation_s, before))
    if any(_generation_s(row) < max(SLOWER * usual_s, SLOW_LEAST_S) for row in last):
        return None
    if any(row[name] * SLOWER > usual[name] for row in last for name in SPEEDS):
        return None
    seconds = statistics.fmean(map(_generation_s, last))
    return now.alert(
        "SLOW01",
        f"rollouts take {seconds:.3g} s without waiting for rewards, usually {usual_s:.3g} s, with "
        f"{now.row[TOKEN_RATE]:.3g} instead of {usual[TOKEN_RATE]:.3g} tokens per GPU and second",
        evidence={"seconds": seconds, "usual_s": usual_s, "tokens_per_s": now.row[TOKEN_RATE]},
        level=seconds / usual_s,
    )


def _generation_s(row: Row) -> float:
    return row["perf/rollout_time"] - row.get("perf/reward_wait_time", 0.0)


def hacked_rewards(now: StepContext) -> Alert | None:
    """REW05: samples that do nothing, or end their process, have the highest reward."""
    for kind, what in (("empty", "have no text"), ("exit", "call os._exit")):
        num, best = (now.row.get(f"rollout/suspicious/{name}", 0.0) for name in (kind, f"{kind}_best"))
        if best >= HACKS and best >= HACK_SHARE * num:
            return now.alert(
                "REW05",
                f"{num:.0f} samples {what}, and {best:.0f} of them have the highest reward of the rollout",
                evidence={"kind": kind, "samples": num, "best": best},
                level=best,
            )
    return None


def data_wait(now: StepContext) -> Alert | None:
    """DATA03: the share of steps spent reading prompts."""
    data_s, step_s = now.recent("perf/data_time", DATA_ROWS), now.recent("perf/step_time", DATA_ROWS)
    if now.row.get("perf/wait_time_ratio", 0.0) < WAITED or min(len(data_s), len(step_s)) < DATA_ROWS:
        return None
    share, mean_s = sum(data_s) / sum(step_s), sum(data_s) / len(data_s)
    if share < DATA_SHARE or mean_s < DATA_LEAST_S:
        return None
    workers = now.facts.config.data.num_data_workers
    return now.alert(
        "DATA03",
        f"reading prompts takes {mean_s:.3g} s, {share:.0%} of a step (--num-data-workers {workers})",
        remedy=f"use --num-data-workers {max(2 * workers, 4)}, --streaming-data, or `furlong data tokenize` before the "
        "run; if you have a custom data source, make it faster",
        evidence={"data_s": mean_s, "share": share, "num_data_workers": workers},
        level=share,
    )


def staleness(now: StepContext) -> Alert | None:
    """ASYNC01: staleness of the trained tokens against the bound that the flags promise."""
    oldest, mean = now.row.get("rollout/staleness/max"), now.row.get("rollout/staleness/mean")
    config, rollout = now.facts.config, now.facts.config.rollout
    if oldest is None or mean is None or config.debug.debug_rollout_only or config.debug.load_debug_rollout_data:
        return None
    bound = max_staleness(config)
    # Partial rollouts carry tokens over, so the bound then applies to the mean.
    age = mean if rollout.partial_rollout else oldest
    if age <= bound + (1 if rollout.partial_rollout else 0):
        return None
    return now.alert(
        "ASYNC01",
        f"samples are at most {oldest:.0f} and on average {mean:.2g} rollouts old; the flags promise {bound}",
        remedy="lower --async-buffer-size or --over-sampling-batch-size (surplus samples are trained on later), set "
        "--update-weights-interval 1, or exclude old tokens from the loss with --mask-offpolicy-in-partial-rollout",
        evidence={"max": oldest, "mean": mean, "bound": bound},
        level=age,
    )


def tool_output(now: StepContext) -> Alert | None:
    """TOOL01: tokens in the loss that no engine sampled."""
    samples = now.row.get("rollout/env_tokens_in_loss", 0.0)
    if not samples:
        return None
    finding = f"{samples:.0f} samples train on tokens that the policy did not sample"
    return now.alert("TOOL01", finding, evidence={"samples": samples}, level=samples)


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


MONITORS = (  # those that may explain others first
    StepMonitor("REW03", failed_rewards, again=5),
    StepMonitor("HOOK01", failed_generation, again=5),
    StepMonitor("TOOL01", tool_output, again=5),
    StepMonitor("TOOL02", full_context, again=2),
    StepMonitor("STOP02", truncation),
    StepMonitor("REW02", rewards_without_spread, again=4),
    StepMonitor("NUM06", without_effect),
    StepMonitor("SLOW01", slow_generation, again=2),
    StepMonitor("REW04", reward_wait, again=1.5),
    StepMonitor("REW05", hacked_rewards, again=4),
    StepMonitor("HOOK02", blocking, again=1.5),
    StepMonitor("DATA03", data_wait, again=2),
    StepMonitor("ASYNC01", staleness, again=2),
)
