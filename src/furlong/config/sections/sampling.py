"""What is generated and how it is scored: data, rollout, evaluation, rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from furlong.config.flag import flag


@dataclass(frozen=True)
class DataFlags:
    """The prompts, and how many of them make a rollout."""

    prompt_data: str | None = flag(None, "Prompts, a .jsonl or .parquet file; `FILE@[a:b]` takes rows a to b - 1.")
    rollout_batch_size: int = flag(
        0, "Prompts of one rollout. Required; 0 stands for not given.", within="[0, 1000000]"
    )
    n_samples_per_prompt: int = flag(1, "Responses sampled for each prompt.", within="[1, inf)")
    num_rollout: int | None = flag(
        None, "Rollouts of the whole run, counted from the first start; 0 only evaluates.", within="[0, inf)"
    )
    num_epoch: int | None = flag(
        None, "Passes over the prompts; the run's length where --num-rollout is not given.", within="[1, inf)"
    )
    start_rollout_id: int | None = flag(
        None, "First rollout. Without it: the one after the loaded checkpoint, or 0.", within="[0, inf)"
    )
    input_key: str = flag("input", "Column of the prompt: a text or a list of messages.")
    label_key: str | None = flag(None, "Column of the label that rewards compare with.")
    metadata_key: str = flag("metadata", "Column of an object that becomes the sample's metadata.")
    tool_key: str = flag("tools", "Column of the tool descriptions for the chat template.")
    apply_chat_template: bool = flag(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = flag(  # noqa: RUF009  flag() declares a field
        {}, "Arguments for the chat template.", needs="apply_chat_template"
    )
    chat_template_path: str | None = flag(
        None,
        "Chat template in place of the tokenizer's: a Jinja file, or the name of one that ships with furlong "
        "(`furlong template list`).",
    )
    rollout_shuffle: bool = flag(False, "Shuffle the prompts anew in every epoch.")
    rollout_seed: int = flag(42, "Seed of the order of prompts and of sampling.", within="[0, 1e18]")
    rollout_global_dataset: bool = flag(True, "Leave the data to the rollout function; --prompt-data is not read.")
    data_source_path: str | None = flag(None, "Your own data source, a class. Without it: --prompt-data is read.")
    buffer_filter_path: str | None = flag(
        None, "Your function that picks groups from the buffer of unfinished ones. Without it: the oldest first."
    )
    streaming_data: bool = flag(False, "Read the prompts as they are needed, not all at the start.")
    num_data_workers: int = flag(0, "Threads that read and tokenize ahead; 0 does so when asked.", within="[0, inf)")


@dataclass(frozen=True)
class RolloutFlags:
    """Generation of the training samples."""

    hf_checkpoint: str | None = flag(
        None, "Model to start from: a folder with config, tokenizer and weights. Required."
    )
    rollout_temperature: float = flag(1.0, "Sampling temperature.", within="(0, inf)")
    rollout_top_p: float = flag(1.0, "Sample from the smallest set of tokens with this probability.", within="(0, 1]")
    rollout_top_k: int = flag(-1, "Sample from this many most probable tokens; -1 from all.", within="[-1, inf)")
    rollout_min_p: float = flag(
        0.0, "Leave out tokens less probable than this times the most probable one.", within="[0, 1]"
    )
    rollout_min_new_tokens: int = flag(0, "Shortest response, in tokens.", within="[0, inf)")
    rollout_max_response_len: int | None = flag(
        None, "Longest response, in tokens. Without it: what --rollout-max-context-len leaves.", within="[1, inf)"
    )
    rollout_max_prompt_len: int | None = flag(
        None, "Longest prompt, in tokens; longer ones are left out and counted.", within="[1, inf)"
    )
    rollout_max_context_len: int | None = flag(
        None, "Longest prompt + response, in tokens. Without it: the model's.", within="[2, inf)"
    )
    rollout_stop: tuple[str, ...] | None = flag(None, "Texts that end a response.")
    rollout_stop_token_ids: tuple[int, ...] | None = flag(None, "Token ids that end a response.")
    rollout_skip_special_tokens: bool = flag(False, "Leave special tokens out of the response's text.")
    over_sampling_batch_size: int | None = flag(
        None,
        "Prompts submitted at a time until a rollout is full. Without it: --rollout-batch-size.",
        within="[1, inf)",
    )
    partial_rollout: bool = flag(False, "Keep aborted responses and complete them in a later rollout.")
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "Do not train on the tokens that an earlier policy generated.", needs="partial_rollout"
    )
    async_buffer_size: int | None = flag(
        None, "Rollouts that may run beyond the one in training; 0 is synchronous.", within="[0, inf)"
    )
    rollout_function_path: str | None = flag(None, "Your function that makes a whole rollout.")
    custom_generate_function_path: str | None = flag(None, "Your function that generates one sample.")
    rollout_sample_hook_path: tuple[str, ...] = flag(
        (), "Your function called on each sample after generation, before its reward.", kind="append"
    )
    dynamic_sampling_filter_path: str | None = flag(None, "Your function that keeps or drops a scored group.")
    rollout_sample_filter_path: str | None = flag(
        None, "Your function that marks samples which are not trained on (`remove_sample`)."
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "Your function that sees all groups of a rollout, the dropped ones too."
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "Your function that may change a batch once log-probs and advantages are there."
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "Your function that makes the training batch of the samples."
    )
    custom_rollout_log_function_path: str | None = flag(None, "Your function that logs a rollout.")


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
