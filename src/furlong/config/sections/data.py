"""The prompts, and how many of them make a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from furlong.config.flag_spec import flag


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
