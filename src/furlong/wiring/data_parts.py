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
from furlong.wiring.shared import Shared

logger = logging.getLogger(__name__)


def build_source(shared: Shared, ledger: FileLedger) -> DataSource:
    """Build the data source: the user's own, none, or prompts from a file."""
    config, data = shared.config, shared.config.data
    if shared.hooks.data_source is not None:
        return CustomDataSource(
            shared.hooks.data_source(shared.args), tokenizer=shared.tokenizer, rollout_seed=data.rollout_seed
        )
    if config.debug.load_debug_rollout_data is not None:
        return EmptyDataSource()
    if data.rollout_global_dataset and data.prompt_data is None:
        return EmptyDataSource()  # evaluation only; any other run needs prompts (validated)
    return RolloutDataSource(
        _prompts(shared),
        n_samples_per_prompt=data.n_samples_per_prompt,
        shuffle=data.rollout_shuffle,
        rollout_seed=data.rollout_seed,
        num_epoch=data.num_epoch,
        buffer_filter=shared.hooks.buffer_filter,
        args=shared.args,
        on_drop=ledger.dropped,
    )


def _prompts(shared: Shared) -> Prompts:
    config, data = shared.config, shared.config.data
    if not data.rollout_global_dataset:
        return EmptyPrompts()
    assert data.prompt_data is not None
    return open_prompts(
        data.prompt_data,
        tokenizer=shared.tokenizer,
        prompt_format=PromptFormat.of_training(config),
        streaming=data.streaming_data,
        num_workers=data.num_data_workers,
        skip_bad_rows=config.fault.skip_bad_rows,
    )


def build_ledger(shared: Shared, resumed: tuple[int, dict[str, Any]] | None) -> FileLedger:
    """Open the ledger, at the position (step, mark) of the checkpoint that the run resumes from, if any."""
    path = shared.folder / "ledger.jsonl"
    may_wait = shared.hooks.buffer_filter is not None or shared.hooks.data_source is not None
    if resumed is None:
        return FileLedger(path, may_wait=may_wait)
    if not path.exists():
        logger.warning(
            "--load %s resumes a run whose ledger is not in %s; a new ledger starts at step %d, and the audit does "
            "not cover earlier steps",
            shared.config.checkpoint.load,
            shared.folder,
            resumed[0],
        )
        return FileLedger(path, is_partial=True, may_wait=may_wait)
    return FileLedger.resume(path, resumed[1], may_wait=may_wait)
