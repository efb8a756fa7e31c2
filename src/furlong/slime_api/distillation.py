"""Rewards that are a teacher's log-probs: `slime.rollout.on_policy_distillation`.

The reward of a sample is the reply of the server at `--rm-url` to its tokens. The post-processing, which gets the
samples of a batch, moves the log-probs of the response into `teacher_log_probs`; the rewards to train on are 0. Where
both functions are these, and with `--opd-teacher-urls`, as in Miles, the run asks the teachers itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from furlong.config.teachers import is_asked_for
from furlong.core.sample import Sample
from furlong.slime_api.http import post


async def reward_func(args: Any, sample: Sample, **_: Any) -> dict[str, Any] | float:
    """Return the reply of SGLang's /generate at `--rm-url`, with log-probs of the response; 0 if the run asks."""
    if _is_asked_for(args):
        return 0.0
    params = {"temperature": args.rollout_temperature, "max_new_tokens": 0, "skip_special_tokens": False}
    start = max(sample.prompt_length - 1, 0)  # the first log-prob is None
    body = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True, "logprob_start_len": start}
    return await post(args.rm_url, body)


def post_process_rewards(args: Any, samples: Sequence[Sample], **_: Any) -> tuple[list[float], list[float]]:
    """Set `teacher_log_probs` from the replies, and return rewards of 0, twice."""
    for sample in () if _is_asked_for(args) else samples:
        reply: Any = sample.get_reward_value(args)
        rows = reply["meta_info"]["input_token_logprobs"]
        sample.teacher_log_probs = [row[0] for row in rows[len(rows) - sample.response_length :]]
    zeros = [0.0] * len(samples)
    return zeros, zeros


def _is_asked_for(args: Any) -> bool:
    return bool(args.opd_teacher_urls) or is_asked_for(args.custom_rm_path, args.custom_reward_post_process_path)
