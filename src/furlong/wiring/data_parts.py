"""Build the data source and the ledger."""

from __future__ import annotations

import logging
from typing import Any

from furlong.data.custom_source import CustomDataSource
from furlong.data.dataset import Prompts, open_prompts
from furlong.data.empty import EmptyDataSource, EmptyPrompts
from furlong.data.ledger import FileLedger
from furlong.data.prompt import PromptFormat
from furlong.data.source import RolloutDataSource
from furlong.interfaces import DataSource
from furlong.wiring.run_context import RunContext

logger = logging.getLogger(__name__)


def build_source(context: RunContext, ledger: FileLedger) -> DataSource:
    """Build the data source: the user's own, none, or prompts from a file."""
    config, data = context.config, context.config.data
    if context.hooks.data_source is not None:
        return CustomDataSource(
            context.hooks.data_source(context.args), tokenizer=context.tokenizer, rollout_seed=data.rollout_seed
        )
    if config.debug.load_debug_rollout_data is not None:
        return EmptyDataSource()
    if data.rollout_global_dataset and data.prompt_data is None:
        return EmptyDataSource()  # evaluation only; any other run needs prompts (validated)
    return RolloutDataSource(
        _prompts(context),
        n_samples_per_prompt=data.n_samples_per_prompt,
        shuffle=data.rollout_shuffle,
        rollout_seed=data.rollout_seed,
        num_epoch=data.num_epoch,
        buffer_filter=context.hooks.buffer_filter,
        args=context.args,
        on_drop=ledger.dropped,
    )


def _prompts(context: RunContext) -> Prompts:
    config, data = context.config, context.config.data
    if not data.rollout_global_dataset:
        return EmptyPrompts()
    assert data.prompt_data is not None
    return open_prompts(
        data.prompt_data,
        tokenizer=context.tokenizer,
        prompt_format=PromptFormat.of_training(config),
        streaming=data.streaming_data,
        num_workers=data.num_data_workers,
        skip_bad_rows=config.fault.skip_bad_rows,
    )


def build_ledger(context: RunContext, resumed: tuple[int, dict[str, Any]] | None) -> FileLedger:
    """Open the ledger, at the position (step, mark) of the checkpoint that the run resumes from, if any."""
    path = context.folder / "ledger.jsonl"
    may_wait = context.hooks.buffer_filter is not None or context.hooks.data_source is not None
    if resumed is None:
        return FileLedger(path, may_wait=may_wait)
    if not path.exists():
        logger.warning(
            "--load %s resumes a run whose ledger is not in %s; a new ledger starts at step %d, and the audit does "
            "not cover earlier steps",
            context.config.checkpoint.load,
            context.folder,
            resumed[0],
        )
        return FileLedger(path, is_partial=True, may_wait=may_wait)
    return FileLedger.resume(path, resumed[1], may_wait=may_wait)
