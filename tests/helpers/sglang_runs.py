"""Complete runs with SGLang servers, and checks that apply to all of them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from furlong.core.sample import Sample
from furlong.data.audit import audit
from furlong.files.sample_file import load_samples
from runs import flags, rows, train, write_model, write_prompts

ROLLOUTS = 3
WHOLE = "every checksum verified"


@dataclass(frozen=True)
class Trained:
    """A successful run: log, samples of each rollout, and log-prob differences between engine and trainer."""

    log: str
    rollouts: list[list[Sample]]
    gaps: list[float]  # mean log-prob difference of each step

    @property
    def proofs(self) -> list[str]:
        """Return the logged verification of each weight update, from version 0 on."""
        updates = re.findall(r"weight_sync done: version (\d+), .*s, (.*)", self.log)
        assert [int(version) for version, _ in updates] == list(range(len(updates)))
        return [proof for _, proof in updates]


def write_wide(
    folder: Path,
    width: int,
    *,
    has_experts: bool = False,
    seed: int = 0,
    config: type[PretrainedConfig] = Qwen3Config,
) -> Path:
    """Write a model wide enough for SGLang's kernels: of the family of `config`, or Qwen3-MoE with 8 experts."""
    shape: dict[str, Any] = {"width": width, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    if has_experts:
        config = Qwen3MoeConfig
        shape |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width, "norm_topk_prob": True}
        shape |= {"tie_word_embeddings": False}
    return write_model(folder, config_class=config, seed=seed, intermediate_size=512, **shape)


def run(
    model: Path,
    folder: Path,
    *,
    max_gap: float,
    has_one_version: bool = True,
    num_rollout: int = ROLLOUTS,
    **changes: Any,
) -> Trained:
    """Train for `num_rollout` rollouts in `folder`/run with `runs.flags`, and check the result.

    Every prompt is accounted for and every token has a log-prob. Log-probs of engine and trainer differ by at most
    `max_gap`, and every token of a rollout has the version loaded before it. Without `has_one_version`, only the first
    step is compared.
    """
    argv = flags(
        model, write_prompts(folder / "prompts.jsonl"), folder / "run", num_rollout=num_rollout,
        save_debug_rollout_data=folder / "samples_{rollout_id}.safetensors", log_level="DEBUG", **changes,
    )  # fmt: skip
    assert train(argv) == num_rollout
    assert audit(folder / "run" / "ledger.jsonl", finished=has_one_version).ok
    dumps = [load_samples(folder / f"samples_{number}.safetensors") for number in range(num_rollout)]
    trained = Trained(
        log=(folder / "run" / "run.log").read_text(),
        rollouts=[[sample for group in dump.groups for sample in group.samples] for dump in dumps],
        gaps=[row["train/train_rollout_logprob_abs_diff"] for row in rows(folder / "run")],
    )
    logging.getLogger(__name__).warning("gaps %s; %s", trained.gaps, trained.proofs)
    assert len(trained.gaps) == num_rollout
    assert max(trained.gaps if has_one_version else trained.gaps[:1]) < max_gap
    for number, samples in enumerate(trained.rollouts):
        assert all(len(sample.rollout_log_probs) == sample.response_length for sample in samples)
        if has_one_version:
            assert {version for sample in samples for version in sample.token_versions} == {number}
    return trained
