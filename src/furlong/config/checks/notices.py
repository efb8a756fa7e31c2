"""Flags of slime's scripts that are accepted although something else happens than they ask for: one line for each."""

from __future__ import annotations

from collections.abc import Iterator

from furlong.config.flag_spec import flag_specs
from furlong.config.hooks import BUILT_IN
from furlong.config.sections import Config


def notices(config: Config) -> Iterator[str]:
    """Yield a line per flag: the flag as given, and what happens instead. --strict-flags makes each an error."""
    for spec in flag_specs(Config).values():
        if spec.instead and spec.is_set(config):
            yield f"{spec.with_value(config)} has no effect: {spec.instead}"
    train, megatron = config.train, config.megatron
    if config.moe.moe_token_dispatcher_type == "flex":
        yield "--moe-token-dispatcher-type flex: tokens are sent as with alltoall"
    if train.sequence_parallel and train.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has no effect: with --tensor-model-parallel-size 1 there is nothing to split"
    if megatron.attention_backend == "flash" and train.context_parallel_size > 1:
        yield (
            f"--attention-backend flash with --context-parallel-size {train.context_parallel_size}: context-parallel "
            "attention uses PyTorch's kernels, as with auto"
        )
    if (function := config.algo.custom_tis_function_path) in BUILT_IN:
        yield f"--custom-tis-function-path {function} is not called: --use-tis, --use-rs and their settings do the same"
    yield from _evaluation(config)
    reference = config.checkpoint.ref_load
    if reference not in (None, config.rollout.hf_checkpoint) and not config.algo.uses_reference:
        yield (
            f"--ref-load {reference} without a KL term: training starts from its weights if --load has none, as in "
            "slime, and there is no reference model"
        )


def _evaluation(config: Config) -> Iterator[str]:
    sets = config.eval
    if (sets.eval_prompt_data or sets.eval_config) and not sets.is_used:
        yield "evaluation sets without --eval-interval have no effect: the run does not evaluate, as in slime"
    elif sets.eval_prompt_data and len(sets.eval_prompt_data) == 1:
        yield f"--eval-prompt-data {sets.eval_prompt_data[0]} without a name: the set is named aime, as in slime"


def strict_problems(config: Config) -> Iterator[str]:
    """Yield every notice as a problem, with --strict-flags."""
    if config.debug.strict_flags:
        yield from (f"{notice}; remove the flag, or --strict-flags" for notice in notices(config))
