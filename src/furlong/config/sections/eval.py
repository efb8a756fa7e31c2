"""Flags of the section `eval`."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class EvalFlags:
    """Evaluation sets and their sampling parameters. Sampling defaults to the rollout's values."""

    eval_interval: int | None = flag(
        None, "Rollouts between evaluations.", within="[1, inf)", needs="eval_prompt_data or eval_config"
    )
    eval_prompt_data: tuple[str, ...] | None = flag(
        None, "Evaluation sets as pairs: NAME FILE NAME FILE ...", excludes="eval_config"
    )
    eval_config: str | None = flag(
        None, "YAML or JSON file of evaluation sets with their own settings (`eval.defaults`, `eval.datasets`)."
    )
    skip_eval_before_train: bool = flag(False, "Do not evaluate before the first rollout.")
    n_samples_per_eval_prompt: int = flag(1, "Number of responses per evaluation prompt.", within="[1, inf)")
    eval_pass_k: tuple[int, ...] | None = flag(
        None, "Values of k for pass@k. Default: powers of two up to --n-samples-per-eval-prompt.", within="[1, inf)"
    )
    eval_temperature: float | None = flag(
        None, "Sampling temperature; 0 is greedy. Default: --rollout-temperature.", within="[0, inf)"
    )
    eval_top_p: float | None = flag(
        None,
        "Nucleus sampling: sample from the smallest set of tokens with this total probability. Default: "
        "--rollout-top-p.",
        within="(0, 1]",
    )
    eval_top_k: int | None = flag(
        None, "Sample from this many most likely tokens; -1 for all. Default: --rollout-top-k.", within="[-1, inf)"
    )
    eval_min_new_tokens: int | None = flag(
        None, "Minimum response length, in tokens. Default: --rollout-min-new-tokens.", within="[0, inf)"
    )
    eval_max_response_len: int | None = flag(
        None, "Maximum response length, in tokens. Default: --rollout-max-response-len.", within="[1, inf)"
    )
    eval_max_prompt_len: int | None = flag(
        None, "Maximum prompt length, in tokens. Default: --rollout-max-prompt-len.", within="[1, inf)"
    )
    eval_max_context_len: int | None = flag(
        None,
        "Maximum length of prompt and response together, in tokens. Default: --rollout-max-context-len.",
        within="[2, inf)",
    )
    eval_input_key: str | None = flag(None, "Column of the prompt. Default: --input-key.")
    eval_label_key: str | None = flag(None, "Column of the label. Default: --label-key.")
    eval_tool_key: str | None = flag(None, "Column of the tool definitions. Default: --tool-key.")
    eval_function_path: str | None = flag(None, "User function that evaluates. Default: --rollout-function-path.")
    custom_eval_rollout_log_function_path: str | None = flag(None, "User function that logs an evaluation.")
