"""Complete runs with different SGLang servers on one GPU: separate prefill and decode, or an actor with a judge.

`--sglang-config` gives each engine its own GPUs. These tests place all engines on the first GPU. Flags, servers,
routers, requests and weights are the same as in a run with one GPU per engine.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from furlong.config.topology import Topology
from furlong.inference.sglang.server import SglangServer
from furlong.inference.supervisor.process import HostGpus, LocalHost
from sglang_runs import ROLLOUTS, Trained, run, write_wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"),
]
logger = logging.getLogger(__name__)
TRANSFER = next((name for name in ("nixl", "mooncake") if importlib.util.find_spec(name)), "")
MAX_GAP = 0.02
# Limit cached tokens: a fraction of the free memory would depend on which server starts first.
SGLANG = {
    "engine": "sglang",
    "update_weight_transport": "disk",
    "sglang_attention_backend": os.environ.get("FURLONG_TEST_ATTENTION", "triton"),
    "sglang_mem_fraction_static": 0.7,
    "sglang_max_total_tokens": 32_768,
    "sglang_disable_cuda_graph": True,
    "sglang_decode_log_interval": 1,
    "sglang_server_start_timeout": 240,
    "rollout_max_response_len": 48,
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
    """Put all engines on the first GPU, and collect (role, address, version) of each verified weight update."""
    loaded: list[tuple[str, str, int]] = []
    finish = SglangServer.finish_loading

    def noted(server: SglangServer, version: int) -> None:
        finish(server, version)
        loaded.append((server.role, server.url, version))

    def places(*_: object) -> list[list[HostGpus]]:
        return [[HostGpus(LocalHost(), 0, 1)] for _ in range(2)]

    monkeypatch.setattr("furlong.wiring.engine.local_engine_placements", places)
    monkeypatch.setattr(Topology, "shortage", lambda topology, available: "")  # disable check GPU01
    monkeypatch.setattr(SglangServer, "finish_loading", noted)
    return loaded


def run_on(layout: str, folder: Path, **changes: Any) -> tuple[Trained, list[str]]:
    """Train, and return the run and the log of each engine."""
    (folder / "engines.yaml").write_text(layout)
    trained = run(
        write_wide(folder / "model", 64), folder, max_gap=MAX_GAP, sglang_config=folder / "engines.yaml",
        sglang_log_dir=folder / "logs", **SGLANG, **changes,
    )  # fmt: skip
    return trained, [(folder / "logs" / f"engine-{number}.log").read_text() for number in range(2)]


def counts(log: str) -> tuple[int, int]:
    """Count the prefills with tokens and the decode steps with requests in a log."""
    prefills = [int(found) for found in re.findall(r"Prefill batch.*?#new-token: (\d+)", log)]
    decodes = [int(found) for found in re.findall(r"Decode batch.*?#running-req: (\d+)", log)]
    return sum(found > 0 for found in prefills), sum(found > 0 for found in decodes)


def versions_by(loaded: Sequence[tuple[str, str, int]], key: int) -> dict[str, list[int]]:
    """Return versions in loading order, by role (0) or address (1)."""
    found: dict[str, list[int]] = {}
    for row in loaded:
        found.setdefault(str(row[key]), []).append(row[2])
    return found


@pytest.mark.skipif(not TRANSFER, reason="neither nixl nor mooncake is installed, which carry caches")
def test_prefill_and_decode_servers_receive_every_version(on_one_gpu, tmp_path):
    _, logs = run_on(SPLIT, tmp_path, sglang_disaggregation_transfer_backend=TRANSFER)
    (prefills, decodes_there), (prefills_there, decodes) = map(counts, logs)
    versions = versions_by(on_one_gpu, 0)
    found = (
        f"split by {TRANSFER}: {prefills} prefills and {decodes_there} decode steps in one server, {prefills_there} "
        f"and {decodes} in the other; versions {json.dumps(versions)}"
    )
    logger.warning(found)
    assert min(prefills, decodes) > 0, found
    assert decodes_there == 0, found
    assert versions == {role: list(range(ROLLOUTS + 1)) for role in ("prefill", "decode")}, found


def test_a_judge_model_keeps_its_weights_and_scores_every_sample(on_one_gpu, tmp_path):
    judge = write_wide(tmp_path / "judge", 64, seed=7)
    layout = TWO.replace("JUDGE", str(judge))
    trained, logs = run_on(layout, tmp_path, rm_type=None, custom_rm_path="hooks_zoo.reward_by_judge")
    versions = versions_by(on_one_gpu, 1)
    samples = [sample for rollout in trained.rollouts for sample in rollout]
    labels = {sample.metadata["judge"][0] for sample in samples}
    found = (
        f"actor and judge: prefills and decode steps {[counts(log) for log in logs]}; versions {json.dumps(versions)}; "
        f"the judge's label {labels}; rewards {sorted({s.reward for s in samples})}"
    )
    logger.warning(found)
    assert list(versions.values()) == [list(range(ROLLOUTS + 1))], found  # only the actor's server
    assert len(labels) == 1, found
    assert "update_weights_from_disk" not in logs[1], found
    assert all(s.reward == float(s.metadata["judge"][1][0] % 2) for s in samples), found
    assert all(min(counts(log)) > 0 for log in logs), found
