"""Which runs share their groups in flight between rollouts, and how old tokens may become."""

from __future__ import annotations

from collections.abc import Iterator

from furlong.config.sections import Config


def shares_groups(config: Config) -> bool:
    """Return whether rollouts share the groups in flight, and consist of the first complete ones.

    Asynchronous runs do if permits or a larger bound give them a choice, and for custom generate functions and agents,
    whose episodes may be long. Over-sampling and partial rollouts end each rollout by aborting the rest, so those have
    their own groups.
    """
    rollout = config.rollout
    over = rollout.over_sampling_batch_size
    aborts = rollout.partial_rollout or over not in (None, config.data.rollout_batch_size)
    if not rollout.async_buffer_size or aborts or rollout.rollout_function_path is not None:
        return False
    return (
        rollout.max_concurrent_episodes is not None
        or max_staleness(config) > default_staleness(config)
        or rollout.stale_tokens != "pace"
        or rollout.custom_generate_function_path is not None
        or config.session.agent_function_path is not None
        or config.session.agent_command is not None
    )


def default_staleness(config: Config) -> int:
    """Return the age that tokens can reach if rollouts are trained on in order."""
    return (config.rollout.async_buffer_size or 0) + config.sync.update_weights_interval - 1


def max_staleness(config: Config) -> int:
    """Return the bound of the age of trained tokens, in rollouts."""
    bound = config.rollout.max_token_staleness
    return default_staleness(config) if bound is None else bound


def pool_problems(config: Config) -> Iterator[str]:
    """Yield contradictions of the flags of episodes in flight and of the age of tokens."""
    rollout = config.rollout
    bound, least = rollout.max_token_staleness, default_staleness(config)
    generates = rollout.rollout_function_path is None and config.algo.loss_type != "sft_loss"
    if rollout.max_concurrent_episodes is not None and not (generates and not config.debug.debug_train_only):
        yield (
            f"--max-concurrent-episodes {rollout.max_concurrent_episodes} has no effect: this run does not generate "
            "rollouts from prompts; remove it"
        )
    if bound is None:
        return
    if not rollout.async_buffer_size and not rollout.partial_rollout and bound >= least:
        yield (
            f"--max-token-staleness {bound} has no effect: without rollouts in flight ahead of training, tokens are at "
            f"most {least} rollouts old; raise --async-buffer-size, or remove it"
        )
    elif rollout.stale_tokens == "pace" and rollout.partial_rollout:
        yield (
            f"--max-token-staleness {bound} with --partial-rollout: a response that is continued later may be older; "
            "add --stale-tokens mask or drop"
        )
    elif rollout.stale_tokens == "pace" and bound < least:
        yield (
            f"--max-token-staleness {bound} is less than --async-buffer-size {rollout.async_buffer_size or 0} + "
            f"--update-weights-interval {config.sync.update_weights_interval} - 1 = {least}: waiting cannot keep it; "
            f"raise it to {least}, lower one of them, or use --stale-tokens mask or drop"
        )
