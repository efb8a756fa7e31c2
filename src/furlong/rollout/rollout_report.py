"""What a rollout reports besides its samples: throughput, and why every sample failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.metric import Metrics, mean, total
from furlong.core.sample import Group, Sample, Status
from furlong.rollout.episode_limits import SILENT


def throughput(samples: Sequence[Sample], seconds: float, num_gpus: int) -> Metrics:
    """Measure the tokens of a rollout per second and GPU (or CPU process)."""
    tokens = sum(s.response_length for s in samples)
    effective = sum(s.effective_response_length for s in samples)
    longest = max((s.response_length for s in samples), default=0)
    return {
        "perf/rollout_time": total(seconds),
        "perf/tokens_per_gpu_per_sec": mean(tokens / seconds / num_gpus),
        "perf/effective_tokens_per_gpu_per_sec": mean(effective / seconds / num_gpus),
        "perf/longest_sample_tokens_per_sec": mean(longest / seconds),
    }


def exceeds_context(sample: Sample) -> bool:
    """Return whether the engine refused a request of the sample's function because it exceeds the context."""
    return sample.outcome is not None and sample.outcome.kind == "failed" and "context length" in sample.outcome.reason


def all_failed(rollout_id: int, groups: Sequence[Group]) -> Diagnosis:
    """Diagnose why every sample fails: the most frequent reasons, and which function or limit is responsible."""
    outcomes = [s.outcome for g in groups for s in g.samples if s.status is Status.FAILED and s.outcome is not None]
    counts = Counter(outcome.reason for outcome in outcomes)
    reasons = "; ".join(f"{n}x {reason}" for reason, n in counts.most_common(3))
    is_slow = sum(outcome.kind == "timed_out" for outcome in outcomes) * 2 > len(outcomes)
    finding = f"rollout {rollout_id}: every sample of {len(groups)} groups in a row failed: {reasons}"
    if sum(outcome.stage == "generate" for outcome in outcomes) * 2 <= len(outcomes):
        remedy = "raise --reward-timeout, or --num-reward-workers" if is_slow else "fix the reward function"
        cause = (
            "The reward function, or the server it calls, fails for every sample; failures do not count as reward 0."
        )
        test = "`furlong reward test` with the same flags runs it on a few rows"
        return diagnosis("REW03", finding, cause=cause, remedy=f"{remedy}; {test}")
    if is_slow:
        cause = "The engine is too slow for --generate-timeout, or responses do not end."
        remedy = "raise --generate-timeout, or lower --rollout-max-response-len"
        return diagnosis("STOP02", finding, cause=cause, remedy=remedy)
    failed = [s for g in groups for s in g.samples if s.status is Status.FAILED]
    if sum(SILENT in s.metadata for s in failed) * 2 > len(failed):
        return diagnosis("AGT07", finding)
    if sum(map(exceeds_context, failed)) * 2 > len(failed):
        cause = "The history grows with each turn, and the function requests more tokens when the context is full."
        remedy = (
            "return the sample with status TRUNCATED when len(sample.tokens) approaches the context length; keep fewer "
            "turns, or raise --rollout-max-context-len"
        )
        return diagnosis("TOOL02", finding, cause=cause, remedy=remedy)
    return diagnosis(
        "HOOK01",
        finding,
        cause="It fails for every prompt.",
        remedy="fix what generates samples: --custom-generate-function-path, --agent-function-path, --agent-command or "
        "--environment",
    )
