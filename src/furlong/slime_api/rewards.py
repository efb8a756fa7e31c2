"""Rewards for user functions: `slime.rollout.rm_hub`. Scores are those of furlong's verifiers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from furlong.core.sample import Sample
from furlong.errors import RewardError, RolloutError
from furlong.interfaces import Reward
from furlong.rewards.group_reward import GroupReward
from furlong.rewards.math_text import last_boxed
from furlong.rewards.verifiers import (
    dapo_score,
    f1_score,
    f1_words,
    gpqa_score,
    ifbench_score,
    quick_deepscaler,
    quick_math,
)
from furlong.rollout.agent import policy

BOX_TAIL, DAPO_TAIL = 100, 300  # last characters of a response in which a strict box, and any answer, is searched

_rewards: WeakKeyDictionary[asyncio.AbstractEventLoop, GroupReward] = WeakKeyDictionary()


async def async_rm(args: Any, sample: Sample, **_: Any) -> float | dict[str, Any]:
    """Return the reward of a sample by the run's reward function or verifier. Raises RewardError if it fails."""
    return (await batched_async_rm(args, [sample]))[0]


async def batched_async_rm(args: Any, samples: Sequence[Sample], **_: Any) -> list[float | dict[str, Any]]:
    """Return the rewards of samples. Raises RewardError with the reason if one cannot be scored."""
    outcomes = await _reward_of(args)(samples)
    rewards: list[float | dict[str, Any]] = []
    for sample, outcome in zip(samples, outcomes, strict=True):
        if outcome.kind != "scored" or outcome.reward is None:
            raise RewardError(f"sample {sample.index} was not scored: {outcome.reason or outcome.kind}")
        rewards.append(outcome.reward)
    return rewards


def _reward_of(args: Any) -> Reward:
    """Return the run's reward in a generate function; elsewhere one with the same flags."""
    try:
        reward = policy().reward
    except RolloutError:
        reward = None
    if reward is not None:
        return reward
    loop = asyncio.get_running_loop()
    if loop not in _rewards:
        _rewards[loop] = GroupReward(
            rm_type=args.rm_type,
            rm_url=args.rm_url,
            custom_rm=args.custom_rm_path,
            group_rm=args.group_rm,
            timeout_s=args.reward_timeout,
            in_process=True,
            args=args,
        )
    return _rewards[loop]


def dapo_compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    r"""Return `score` 1.0 or -1.0, `acc` and `pred` of DAPO's answer check.

    With `strict_box_verify`, `pred` is the content of the last `\boxed{}` in the last 100 characters, None without one,
    and must equal the truth. Raises RolloutError for `pause_tokens_index`.
    """
    if pause_tokens_index is not None:
        raise RolloutError("compute_score: pause_tokens_index is not supported by furlong; leave it out")
    if not strict_box_verify:
        return dapo_score(solution_str[-DAPO_TAIL:], ground_truth, {})
    pred = last_boxed(solution_str[-BOX_TAIL:])
    is_right = pred == ground_truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def extract_answer(passage: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, None without one."""
    return last_boxed(passage)


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last box with its `\boxed{}` or `\fbox{}`, None without one."""
    content = last_boxed(string)
    if content is None:
        return None
    start = string.rfind(content)
    opened = max(string.rfind(name, 0, start) for name in ("\\boxed", "\\fbox"))
    return string[opened : string.index("}", start + len(content)) + 1]


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    r"""Return whether the last `\boxed{}` of the solution equals the truth, as `--rm-type math` judges it."""
    if not ground_truth or last_boxed(solution_str) is None:
        return False
    return bool(_slow_or("math_score", quick_math(solution_str, ground_truth, {}), solution_str, ground_truth))


def deepscaler_reward(response: str | None, label: Any) -> float:
    """Return 1.0 or 0.0, as `--rm-type deepscaler` does; 0.0 for None."""
    if response is None:
        return 0.0
    return _slow_or("deepscaler_score", quick_deepscaler(response, label, {}), response, label)


def _slow_or(name: str, quick: float | None, response: str, label: Any) -> float:
    if quick is not None:
        return quick
    from furlong.rewards import algebra  # imports sympy

    return getattr(algebra, name)(response, label, {})


def f1_scores(prediction: str | None, ground_truth: Any) -> tuple[float, float, float]:
    """Return the token-level F1, precision and recall, 0.0 for None; the first is `--rm-type f1`'s score."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    words, truth = f1_words(prediction), f1_words(str(ground_truth))
    common = (Counter(words) & Counter(truth)).total()
    score = f1_score(prediction, ground_truth, {})
    return (score, common / len(words), common / len(truth)) if score and words and truth else (score, score, score)


def gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 or 0.0, as `--rm-type gpqa` does; 0.0 for None."""
    if response is None:
        return 0.0
    return gpqa_score(response, label, metadata or {})


def ifbench_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 or 0.0, as `--rm-type ifbench` does. Raises DataError for metadata without instructions."""
    return ifbench_score(response, label, metadata or {})
