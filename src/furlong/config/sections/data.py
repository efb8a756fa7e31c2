"""Flags of the section `data`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class DataFlags:
    """Prompts, and the number of prompts per rollout."""

    prompt_data: str | None = flag(None, "Prompts: a .jsonl or .parquet file; `FILE@[a:b]` selects rows a to b - 1.")
    rollout_batch_size: int = flag(0, "Number of prompts per rollout. Required.", within="[0, 1000000]")
    n_samples_per_prompt: int = flag(1, "Number of responses per prompt.", within="[1, inf)")
    num_rollout: int | None = flag(
        None, "Total number of rollouts, counted from the first start of the run; 0 only evaluates.", within="[0, inf)"
    )
    num_epoch: int | None = flag(
        None,
        "Number of passes over the prompts; determines the length of the run if --num-rollout is not given.",
        within="[1, inf)",
    )
    start_rollout_id: int | None = flag(
        None, "Number of the first rollout. Default: the one after the loaded checkpoint, else 0.", within="[0, inf)"
    )
    input_key: str = flag("input", "Column of the prompt: text, or a list of messages.")
    label_key: str | None = flag(None, "Column of the label that rewards compare with.")
    metadata_key: str = flag("metadata", "Column of an object that becomes the sample's metadata.")
    tool_key: str = flag("tools", "Column of the tool definitions for the chat template.")
    apply_chat_template: bool = flag(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = flag(  # noqa: RUF009  flag() declares a field
        {}, "Keyword arguments for the chat template, as a JSON object.", needs="apply_chat_template"
    )
    chat_template_path: str | None = flag(
        None,
        "Chat template to use instead of the tokenizer's: a Jinja file, or the name of a shipped one (`furlong "
        "template list`).",
        needs="apply_chat_template or loss_type=sft_loss or custom_generate_function_path or rollout_function_path or "
        "eval_function_path or eval_config or data_source_path",
    )
    rollout_shuffle: bool = flag(False, "Shuffle the prompts in every epoch.")
    rollout_seed: int = flag(42, "Seed of the prompt order and of sampling.", within="[0, 1e18]")
    rollout_global_dataset: bool = flag(True, "Do not read --prompt-data; the rollout function provides its own data.")
    data_source_path: str | None = flag(None, "User data source class. Default: --prompt-data is read.")
    buffer_filter_path: str | None = flag(
        None, "User function that selects groups from the buffer of unfinished ones. Default: oldest first."
    )
    streaming_data: bool = flag(False, "Read prompts on demand instead of all at the start.")
    num_data_workers: int = flag(
        0, "Number of threads that read and tokenize in advance; 0 reads when prompts are needed.", within="[0, inf)"
    )
