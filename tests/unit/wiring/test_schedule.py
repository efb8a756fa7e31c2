from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from furlong.config.sections import Config
from furlong.wiring.build import build_schedule


def test_a_rollout_larger_than_the_data_is_named(caplog):
    source: Any = SimpleNamespace(groups_per_epoch=8)
    for size in (8, 9):
        config = replace(Config(), data=replace(Config().data, num_rollout=3, rollout_batch_size=size))
        context: Any = SimpleNamespace(config=config)
        assert build_schedule(context, source, has_eval=False).num_rollout == 3
        assert ("--rollout-batch-size 9 is more than the 8 prompts" in caplog.text) == (size == 9)
