"""Whole runs on SGLang servers that are not all alike, on one GPU: prefill apart from decode, a judge beside the actor.

`--sglang-config` gives each engine GPUs of its own. Here all of them are put on the first one, and nothing else is
changed: flags, servers, routers, requests and weights are those of a run with a GPU for each.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from furlong.config.topology import Topology
from furlong.data.audit import audit
from furlong.engines.host import LocalHost, Place
from furlong.engines.sglang_server import SglangServer
from furlong.track.dump import load_samples
from runs import flags, rows, train, write_model, write_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"),
]
logger = logging.getLogger(__name__)
TRANSFER = next((name for name in ("nixl", "mooncake") if importlib.util.find_spec(name)), "")
ROLLOUTS, RESPONSE_LEN = 3, 48
# A bound on cached tokens: a share of the memory that is free would depend on which server looks first.
SGLANG = {
    "engine": "sglang",
    "update_weight_transport": "disk",
    "sglang_attention_backend": os.environ.get("FURLONG_TEST_ATTENTION", "triton"),
    "sglang_mem_fraction_static": 0.7,
    "sglang_max_total_tokens": 32_768,
    "sglang_disable_cuda_graph": True,
    "sglang_decode_log_interval": 1,
    "sglang_server_start_timeout": 240,
}
SPLIT = """
sglang:
  - name: default
    server_groups:
      - {worker_type: prefill, num_gpus: 1}
      - {worker_type: decode, num_gpus: 1}
"""
TWO = """
sglang:
  - {name: actor, server_groups: [{worker_type: regular, num_gpus: 1}]}
  - {name: judge, model_path: JUDGE, server_groups: [{worker_type: regular, num_gpus: 1}]}
"""


@pytest.fixture
def on_one_gpu(monkeypatch) -> list[tuple[str, str, int]]:
    """Put all engines on the first GPU; collects (role, address, version) of verified weights that a server has."""
    loaded: list[tuple[str, str, int]] = []
    finish = SglangServer.finish_loading

    def noted(server: SglangServer, version: int) -> None:
        finish(server, version)
        loaded.append((server.role, server.url, version))

    def places(shared: object) -> list[list[Place]]:
        del shared
        return [[Place(LocalHost(), 0, 1)] for _ in range(2)]

    monkeypatch.setattr("furlong.build.fleet.local_engine_places", places)
    monkeypatch.setattr(Topology, "shortage", lambda topology, available: "")  # GPU01
    monkeypatch.setattr(SglangServer, "finish_loading", noted)
    return loaded


def run(folder: Path, layout: str, **changes):
    """Train; returns the samples of each rollout, and the log of each engine."""
    (folder / "engines.yaml").write_text(layout)
    model = write_model(folder / "model", width=64, num_attention_heads=4, num_key_value_heads=2)
    argv = flags(
        model, write_prompts(folder / "prompts.jsonl"), folder / "run", sglang_config=folder / "engines.yaml",
        sglang_log_dir=folder / "logs", num_rollout=ROLLOUTS, rollout_max_response_len=RESPONSE_LEN,
        save_debug_rollout_data=folder / "samples_{rollout_id}.safetensors", **SGLANG, **changes,
    )  # fmt: skip
    assert train(argv) == ROLLOUTS
    assert audit(folder / "run" / "ledger.jsonl", finished=True).ok
    dumps = [load_samples(folder / f"samples_{i}.safetensors") for i in range(ROLLOUTS)]
    logs = [(folder / "logs" / f"engine-{i}.log").read_text() for i in range(2)]
    return [[sample for group in dump.groups for sample in group.samples] for dump in dumps], logs


def gaps(folder: Path) -> list[float]:
    """Mean difference of log-probs between engine and trainer in each step."""
    return [row["train/train_rollout_logprob_abs_diff"] for row in rows(folder / "run")]


def counts(log: str) -> tuple[int, int]:
    """Prefills with prompt tokens in them, and decode steps with requests in them, that a log tells of."""
    prefills = [int(found) for found in re.findall(r"Prefill batch.*?#new-token: (\d+)", log)]
    decodes = [int(found) for found in re.findall(r"Decode batch.*?#running-req: (\d+)", log)]
    return sum(found > 0 for found in prefills), sum(found > 0 for found in decodes)


def versions_by(loaded: Sequence[tuple[str, str, int]], key: int) -> dict[str, list[int]]:
    """Versions in the order of loading, by role (0) or address (1)."""
    found: dict[str, list[int]] = {}
    for row in loaded:
        found.setdefault(str(row[key]), []).append(row[2])
    return found


@pytest.mark.skipif(not TRANSFER, reason="neither nixl nor mooncake is installed, which carry caches")
def test_one_server_prefills_another_decodes_and_both_get_every_version(on_one_gpu, tmp_path):
    rollouts, logs = run(tmp_path, SPLIT, sglang_disaggregation_transfer_backend=TRANSFER)
    (prefills, decodes_there), (prefills_there, decodes) = map(counts, logs)
    versions = versions_by(on_one_gpu, 0)
    found = (
        f"split by {TRANSFER}: {prefills} prefills and {decodes_there} decode steps in one server, {prefills_there} "
        f"and {decodes} in the other; versions {json.dumps(versions)}; gaps {gaps(tmp_path)}"
    )
    logger.warning(found)
    assert min(prefills, decodes) > 0, found
    assert decodes_there == 0, found
    assert versions == {role: list(range(ROLLOUTS + 1)) for role in ("prefill", "decode")}, found
    for number, samples in enumerate(rollouts):
        assert {version for s in samples for version in s.token_versions} == {number}, found
        assert all(len(s.rollout_log_probs) == s.response_length for s in samples)
    assert max(gaps(tmp_path)) < 0.02, found


def test_a_judge_beside_the_actor_keeps_its_weights_and_scores_every_sample(on_one_gpu, tmp_path):
    judge = write_model(tmp_path / "judge", seed=7, width=64, num_attention_heads=4, num_key_value_heads=2)
    layout = TWO.replace("JUDGE", str(judge))
    rollouts, logs = run(tmp_path, layout, rm_type=None, custom_rm_path="hooks_zoo.reward_by_judge")
    versions = versions_by(on_one_gpu, 1)
    samples = [sample for rollout in rollouts for sample in rollout]
    labels = {sample.metadata["judge"][0] for sample in samples}
    found = (
        f"actor and judge: prefills and decode steps {[counts(log) for log in logs]}; versions {json.dumps(versions)}; "
        f"the judge's label {labels}; rewards {sorted({s.reward for s in samples})}; gaps {gaps(tmp_path)}"
    )
    logger.warning(found)
    assert list(versions.values()) == [list(range(ROLLOUTS + 1))], found  # of one server, the actor's
    assert len(labels) == 1, found
    assert "update_weights_from_disk" not in logs[1], found
    assert all(s.reward == float(s.metadata["judge"][1][0] % 2) for s in samples), found
    assert all(min(counts(log)) > 0 for log in logs), found
    assert max(gaps(tmp_path)) < 0.02, found
