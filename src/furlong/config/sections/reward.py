"""How responses are scored."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class RewardFlags:
    """How responses are scored."""

    rm_type: str | None = flag(
        None, "Verifier: math, dapo, deepscaler, f1, gpqa, remote_rm or random; `boxed_` before it takes \\boxed{...}."
    )
    rm_url: str | None = flag(None, "Address that --rm-type remote_rm posts samples to.")
    custom_rm_path: str | None = flag(None, "Your reward function.")
    group_rm: bool = flag(False, "Score all samples of a prompt in one call.")
    reward_key: str | None = flag(None, "Entry of a reward that is an object which is trained on.")
    eval_reward_key: str | None = flag(None, "The same for evaluation. Without it: --reward-key.")
    custom_reward_post_process_path: str | None = flag(
        None, "Your function that replaces the normalization of rewards within groups."
    )
    num_reward_workers: int = flag(2, "Processes that run verifiers.", within="[1, inf)")
