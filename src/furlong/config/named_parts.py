"""Paths of slime's and Miles's own functions as values of flags: they select furlong's parts instead of user code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GENERATION = "slime.rollout.sglang_rollout.generate_rollout"
DEMONSTRATIONS = "slime.rollout.sft_rollout.generate_rollout"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
AGENTIC = "slime.rollout.generate_hub.agentic_tool_call.generate"  # of Miles, for --agent-function-path
ROLLOUTS_AHEAD = 2  # of FULLY_ASYNC
CORRECTIONS = {  # values of --custom-tis-function-path, by --tis-mode
    f"slime.backends.{module}.{name}_function": mode
    for module in ("megatron_utils.loss", "training_utils.loss_hub.corrections")
    for name, mode in (("icepop", "mask"), ("vanilla_tis", "clip"))
}

# Values that name what the run does without the flag.
DEFAULTS = {
    "rollout_function_path": (GENERATION,),
    "eval_function_path": (GENERATION,),
    "custom_generate_function_path": (
        "slime.rollout.sglang_rollout.generate",
        "slime.rollout.generate_hub.single_turn.generate",
        AGENTIC,
    ),
    "data_source_path": (
        "slime.rollout.data_source.RolloutDataSource",
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    ),
    "buffer_filter_path": ("slime.rollout.data_source.pop_first",),
}


def select_parts(values: dict[str, Any], sources: dict[str, str]) -> tuple[list[str], list[str]]:
    """Replace paths of slime's functions in `values` by the settings that they stand for, in place.

    `values` are the fields that flags, files and entry points have set, and `sources` where each comes from. Returns
    lines for the log, and problems.
    """
    lines: list[str] = []
    problems = list(_evaluation_problems(values))
    path = _dotted(values.get("rollout_function_path"))
    if _dotted(values.get("custom_generate_function_path")) == AGENTIC and "agent_function_path" not in values:
        problems.append(f"--custom-generate-function-path {AGENTIC} runs an agent; add --agent-function-path")
    if path == DEMONSTRATIONS:
        if values.get("loss_type") == "sft_loss":
            lines.append(f"--rollout-function-path {path}: demonstrations are read as for every --loss-type sft_loss")
        else:
            problems.append(
                f"--rollout-function-path {path} reads demonstrations, but --loss-type is "
                f"{values.get('loss_type', 'policy_loss')}; add --loss-type sft_loss"
            )
        del values["rollout_function_path"]
    elif path == FULLY_ASYNC:
        text = _generate_ahead(values, sources)
        (problems if values["async_buffer_size"] == 0 else lines).append(text)
        del values["rollout_function_path"]
    if (path := _dotted(values.get("custom_tis_function_path"))) in CORRECTIONS:
        mode = CORRECTIONS[path]
        lines.append(f"--custom-tis-function-path {path}: this is --tis-mode {mode}")
        if values.get("use_tis") and values.setdefault("tis_mode", mode) != mode:
            problems.append(f"--custom-tis-function-path {path} and --tis-mode {values['tis_mode']} differ; remove one")
        del values["custom_tis_function_path"]
    for field, names in DEFAULTS.items():
        if (path := _dotted(values.get(field))) in names:
            lines.append(f"--{field.replace('_', '-')} {path}: this is what the run does without the flag")
            del values[field]
    return lines, problems


def _generate_ahead(values: dict[str, Any], sources: dict[str, str]) -> str:
    """Set the rollouts in flight unless a flag or file has; returns the line, or the problem if there are none."""
    flag = f"--rollout-function-path {FULLY_ASYNC}"
    if sources.get("async_buffer_size", "entry point") == "entry point":
        values["async_buffer_size"], sources["async_buffer_size"] = ROLLOUTS_AHEAD, flag
    ahead = values["async_buffer_size"]
    if ahead == 0:
        return f"{flag} with --async-buffer-size 0 would be synchronous; set the rollouts in flight, or remove one"
    if "max_token_staleness" not in sources:  # room for the first complete groups, which slime's worker trains on
        bound = 2 * ahead + values.get("update_weights_interval", 1) - 1
        values["max_token_staleness"], sources["max_token_staleness"] = bound, flag
    return (
        f"{flag}: generation continues during training with --async-buffer-size {ahead} rollouts in flight ahead of "
        "it; a step trains on the first complete groups, of weights at most "
        f"{values['max_token_staleness']} versions old"
    )


def _evaluation_problems(values: dict[str, Any]) -> Iterator[str]:
    """The run's own evaluation needs its own generation, which a user's rollout function replaces."""
    rollout, evaluation = _dotted(values.get("rollout_function_path")), _dotted(values.get("eval_function_path"))
    if evaluation == GENERATION and rollout not in (None, GENERATION, DEMONSTRATIONS, FULLY_ASYNC):
        yield (
            f"--eval-function-path {evaluation} together with --rollout-function-path {rollout} is not "
            "supported; remove it and let your function handle evaluation=True"
        )


def _dotted(path: Any) -> str | None:
    if not isinstance(path, str) or not path.startswith(("slime.", "miles.")):
        return path
    name = f"slime{path[5:]}".replace(":", ".")
    return FULLY_ASYNC if name == "slime.rollout.fully_async_rollout.FullyAsyncRolloutFn" else name
