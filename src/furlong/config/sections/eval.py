"""Evaluation sets, and how their responses are generated."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class EvalFlags:
    """Evaluation sets, and how their responses are sampled. What is not given is as in the rollouts."""

    eval_interval: int | None = flag(None, "Rollouts between two evaluations.", within="[1, inf)")
    eval_prompt_data: tuple[str, ...] | None = flag(None, "Evaluation sets as pairs: NAME FILE NAME FILE ...")
    eval_config: str | None = flag(
        None, "YAML or JSON file with evaluation sets and their own settings (`eval.defaults`, `eval.datasets`)."
    )
    skip_eval_before_train: bool = flag(False, "Do not evaluate before the first rollout.")
    n_samples_per_eval_prompt: int = flag(1, "Responses sampled for each evaluation prompt.", within="[1, inf)")
    eval_pass_k: tuple[int, ...] | None = flag(
        None,
        "Values of k of pass@k. Without it: the powers of two up to --n-samples-per-eval-prompt.",
        within="[1, inf)",
    )
    eval_temperature: float | None = flag(None, "Sampling temperature; 0 is greedy.", within="[0, inf)")
    eval_top_p: float | None = flag(
        None, "Sample from the smallest set of tokens with this probability.", within="(0, 1]"
    )
    eval_top_k: int | None = flag(None, "Sample from this many most probable tokens; -1 from all.", within="[-1, inf)")
    eval_min_new_tokens: int | None = flag(None, "Shortest response, in tokens.", within="[0, inf)")
    eval_max_response_len: int | None = flag(None, "Longest response, in tokens.", within="[1, inf)")
    eval_max_prompt_len: int | None = flag(None, "Longest prompt, in tokens.", within="[1, inf)")
    eval_max_context_len: int | None = flag(None, "Longest prompt + response, in tokens.", within="[2, inf)")
    eval_input_key: str | None = flag(None, "Column of the prompt.")
    eval_label_key: str | None = flag(None, "Column of the label.")
    eval_tool_key: str | None = flag(None, "Column of the tool descriptions.")
    eval_function_path: str | None = flag(
        None, "Your function that evaluates. Without it: --rollout-function-path, if given."
    )
    custom_eval_rollout_log_function_path: str | None = flag(None, "Your function that logs an evaluation.")
