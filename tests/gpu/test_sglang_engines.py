"""Complete runs on SGLang engines with several GPUs: each kind of parallelism, and speculative decoding.

Weights change a lot with each step, so stale weights in any process of an engine show up as a log-prob difference.
The environment variable FURLONG_TEST_ATTENTION selects an attention backend other than Triton.

Two GPUs are enough. Without a third, the trainer runs on a simulated second machine that shares a GPU with the engine:
NCCL rejects two processes on one GPU of the same machine, but connects processes of different machines by sockets.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ray_machines import connected_machines
from sglang_runs import ROLLOUTS, WHOLE, run, write_wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
SGLANG = {
    "engine": "sglang",
    "sglang_attention_backend": os.environ.get("FURLONG_TEST_ATTENTION", "triton"),
    "sglang_max_total_tokens": 1 << 16,  # small, so that engines can share a GPU
    "sglang_disable_cuda_graph": True,
    "sglang_server_start_timeout": 400,
    "rollout_max_response_len": 48,
}
WIDTH, MAX_GAP = 256, 0.02
WITH_EXPERTS = {"sglang_enforce_disable_flashinfer_allreduce_fusion": True}  # these kernels take minutes to build
PAIR = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}
FORMS: dict[str, tuple[int, str, dict[str, Any]]] = {  # name: GPUs, logged weight verification, flags
    "tensor": (3, WHOLE, PAIR),
    "attention": (3, WHOLE, {**PAIR, "sglang_dp_size": 2, "sglang_enable_dp_attention": True}),
    "experts": (3, WHOLE, {**PAIR, **WITH_EXPERTS, "sglang_ep_size": 2}),
    "cut experts": (
        3,
        "every checksum but those of experts verified, a checksum of the engine's own",
        {**PAIR, **WITH_EXPERTS},
    ),
    "stages": (
        3,
        "every checksum of the first of 2 stages verified",
        {**PAIR, "sglang_pp_size": 2, "update_weight_transport": "disk"},
    ),
    "speculative": (2, WHOLE, {"rollout_num_gpus": 1, "sglang_speculative_algorithm": "NGRAM"}),
    "colocated": (2, WHOLE, {"actor_num_gpus_per_node": 2, "rollout_num_gpus_per_engine": 2, "colocate": True}),
}


def machines(*shares: str) -> Mapping[str, dict[str, Any]]:
    """Return machines for `connected_machines`, given the GPU indices of each."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    own: dict[str, dict[str, Any]] = {}
    for number, share in enumerate(shares, 1):
        visible = ",".join(gpus[int(gpu) % len(gpus)] for gpu in share.split(","))
        nccl = {"NCCL_HOSTID": f"machine-{number}", "NCCL_SOCKET_IFNAME": "lo"}
        own[f"127.0.0.{number}"] = {
            "num_cpus": 8,
            "num_gpus": visible.count(",") + 1,
            "env_vars": {"CUDA_VISIBLE_DEVICES": visible, **nccl},
        }
    return own


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_on_several_gpus_serves_each_version(form, tmp_path):
    num_gpus, proof, changes = FORMS[form]
    if torch.cuda.device_count() < min(num_gpus, 2):
        pytest.skip(f"two GPUs are needed, there are {torch.cuda.device_count()}")
    with contextlib.ExitStack() as stack:
        if torch.cuda.device_count() < num_gpus:
            stack.enter_context(connected_machines(machines("0", "0,1")))
            changes = {**changes, "ray_address": "auto", "num_gpus_per_node": 2}
        model = write_wide(tmp_path / "model", WIDTH, has_experts=form.endswith("experts"))
        trained = run(model, tmp_path, max_gap=MAX_GAP, sglang_log_dir=tmp_path / "logs", **SGLANG | changes)
    assert trained.proofs == [proof] * (ROLLOUTS + 1)
    engine = (tmp_path / "logs" / "engine-0.log").read_text()
    if form == "attention":
        assert "DP1 TP1" in engine
    if form == "speculative":
        assert "speculative_algorithm='NGRAM'" in engine


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_an_engine_on_two_nodes_serves_each_version(tmp_path):
    # SGLang's custom all-reduce would detect that both nodes are on one machine.
    with connected_machines(machines("0", "1", "2")):
        trained = run(
            write_wide(tmp_path / "model", WIDTH), tmp_path, max_gap=MAX_GAP, sglang_log_dir=tmp_path / "logs",
            num_gpus_per_node=1, ray_address="auto", sglang_disable_custom_all_reduce=True, **SGLANG, **PAIR,
        )  # fmt: skip
    assert trained.proofs == [WHOLE] * (ROLLOUTS + 1)
    assert "node_rank=1" in (tmp_path / "logs" / "engine-0-node-1.log").read_text()
