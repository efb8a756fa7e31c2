"""How responses are generated."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag


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
