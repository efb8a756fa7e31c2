"""Flags of the section `reward`."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class RewardFlags:
    """Reward functions and verifiers."""

    rm_type: str | None = flag(
        None,
        "Verifier: math, dapo, deepscaler, f1, gpqa, remote_rm or random; with the prefix `boxed_` it reads the "
        r"content of \boxed{...}.",
        excludes="custom_rm_path",
    )
    rm_url: str | None = flag(
        None, "URL to which --rm-type remote_rm posts samples.", needs="rm_type=remote_rm or rm_type=boxed_remote_rm"
    )
    custom_rm_path: str | None = flag(None, "User reward function.")
    group_rm: bool = flag(
        False, "Score all samples of a prompt in one call of --custom-rm-path.", needs="custom_rm_path"
    )
    reward_key: str | None = flag(None, "Key of the value to train on, for rewards that are objects.")
    eval_reward_key: str | None = flag(None, "Key of the value to report in evaluations. Default: --reward-key.")
    custom_reward_post_process_path: str | None = flag(
        None, "User function that replaces the normalization of rewards within groups."
    )
    num_reward_workers: int = flag(2, "Number of processes that run verifiers.", within="[1, inf)")
