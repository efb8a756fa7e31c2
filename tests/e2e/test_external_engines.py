"""Whole runs on servers outside the process: `furlong serve` processes, weights by disk and by broadcast."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from functools import partial
from pathlib import Path

import httpx
import pytest

import faulty_engines
from diagnosed_runs import events
from furlong.core.model_config import read_json
from furlong.data.audit import audit
from furlong.errors import ConfigError, EngineError, SyncError
from furlong.files.sample_file import load_samples
from furlong.models import hf_model as hf
from furlong.models.hf_config import num_experts
from loading_sglang import Loading
from models_zoo import family_config
from runs import flags, rows, sampled, train
from served_engine import router_process, serve_process


@pytest.fixture(scope="module")
def servers(model):
    with serve_process(model) as (_, one), serve_process(model) as (_, two):
        yield [one, two]


@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_external_engines_reproduce_the_run_of_the_embedded_engine(model, data, servers, embedded, tmp_path, transport):
    wanted = embedded[0]
    (first, _), folder = sampled(
        model, data, tmp_path, rollout_external_engine_addrs=servers, update_weight_transport=transport,
        update_weight_buffer_size=8192, log_level="DEBUG",
    )  # fmt: skip
    assert [s.tokens for s in first] == [s.tokens for s in wanted]
    for got, want in zip(first, wanted, strict=True):
        assert got.rollout_log_probs == pytest.approx(want.rollout_log_probs, abs=1e-5)
        assert got.token_versions == want.token_versions
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert all(
        row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows(folder)
    )  # the weights are the trainer's
    assert rows(folder)[-1]["train/grad_norm"] > 0
    [connected] = events(folder, "engines_connected")
    assert (connected["num"], connected["kv_cache_dtypes"]) == (2, ["auto"])
    log = (folder / "run.log").read_text()
    assert log.count("weight_sync start") == log.count("weight_sync done") == 3
    assert log.count("every checksum verified") == 3
    assert audit(folder / "ledger.jsonl", finished=True).ok
    if transport == "disk":
        assert [path.name for path in (folder / "weights").iterdir() if path.is_dir()] == ["version_000002"]
    versions = [httpx.get(f"{url}/weight_version", timeout=20).json() for url in servers]
    assert versions == [{"weight_version": "2"}] * 2


def test_a_server_killed_in_a_rollout_loses_no_prompt(model, data, embedded, tmp_path):
    wanted = embedded[0]
    fault = partial(faulty_engines.sends_a_signal_while_generating, signal.SIGKILL, tmp_path / "killed")
    with serve_process(model, fault=fault) as (victim, one), serve_process(model) as (_, two):
        (first, _), folder = sampled(model, data, tmp_path, rollout_external_engine_addrs=[one, two])
        victim.join(20)
    assert victim.exitcode == -signal.SIGKILL
    assert [s.tokens for s in first] == [s.tokens for s in wanted]
    log = (folder / "run.log").read_text()
    [lost] = [line for line in log.splitlines() if f"engine {one} is lost" in line]
    assert f"POST {one}/generate" in lost  # its running requests were retried
    assert "1 of 2" in log
    report = audit(folder / "ledger.jsonl", finished=True)
    assert report.ok
    assert len(rows(folder)) == 2


@pytest.mark.nightly
def test_a_run_whose_engine_answers_with_other_weights_loses_nothing(model, data, embedded, tmp_path):
    wanted, save = embedded[0], tmp_path / "save"
    once = tmp_path / "answered"
    with serve_process(model, fault=partial(faulty_engines.answers_with_other_version, once)) as (_, url):
        with pytest.raises(EngineError, match=rf"POST {url}/generate answered with weight version '999'"):
            sampled(model, data, tmp_path, rollout_external_engine_addrs=[url], save=save, save_interval=1)
        assert once.exists()
        assert audit(tmp_path / "run" / "ledger.jsonl").ok
        dump = tmp_path / "samples_{rollout_id}.safetensors"
        resumed = flags(
            model, data, tmp_path / "run", rollout_external_engine_addrs=[url], save=save, load=save,
            save_debug_rollout_data=dump, rollout_max_response_len=24,
        )  # fmt: skip
        assert train(resumed) == 2
    second = load_samples(tmp_path / "samples_1.safetensors")
    assert [s.tokens for group in second.groups for s in group.samples] == [s.tokens for s in embedded[1]]
    assert [s.tokens for s in wanted] != [s.tokens for s in embedded[1]]
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok


DAMAGE = """
from pathlib import Path

def damage(args, version_dir, rollout_engines):
    path = Path(version_dir) / {file!r}
    if path.exists():  # the first version is no delta
        content = path.read_bytes()
        path.write_bytes({content})
"""
FLIPPED = "content[:-400] + bytes([content[-400] ^ 4]) + content[-399:]"


@pytest.mark.nightly
def test_weight_files_that_change_before_an_engine_reads_them_end_the_run_and_not_the_engine(model, data, tmp_path):
    shard, half = "model-00001.safetensors", "content[: len(content) // 2]"
    cases = [
        (shard, FLIPPED),
        (shard, half),
        ("model.safetensors.index.json", half),
        ("delta.json", FLIPPED),
        ("delta.bin", FLIPPED),
    ]
    with serve_process(model) as (_, url):
        for number, (file, content) in enumerate(cases):
            hook = tmp_path / f"damage_{number}.py"
            hook.write_text(DAMAGE.format(file=file, content=content))
            argv = flags(
                model, data, tmp_path / str(number), rollout_external_engine_addrs=url, update_weight_transport="disk",
                update_weight_mode="delta" if "delta" in file else "full", update_weight_timeout=20,
                custom_update_weight_post_write_path=f"{hook}:damage",
            )  # fmt: skip
            with pytest.raises(SyncError, match="weights" if file == shard else file) as caught:
                train(argv)
            assert "did not answer" not in str(caught.value)
            assert httpx.get(f"{url}/health", timeout=5).status_code == 200


def with_experts(model: Path, folder: Path) -> Path:
    """A model with experts and the same tokenizer."""
    shutil.copytree(model, folder)
    config = family_config("qwen3_moe")
    config.vocab_size = read_json(model / "config.json")["vocab_size"]
    hf.save_model(hf.build_model(config, seed=0), folder)
    return folder


def test_experts_of_every_process_are_verified_in_a_run(model, data, tmp_path):
    moe = with_experts(model, tmp_path / "moe")
    server = Loading("qwen3_moe", tp_size=2, ep_size=2)
    changes = {"rollout_external_engine_addrs": server.url, "update_weight_transport": "disk", "num_rollout": 1}
    changes |= {"log_level": "DEBUG"}
    try:
        assert train(flags(moe, data, tmp_path / "run", **changes)) == 1
        log = (tmp_path / "run" / "run.log").read_text()
        assert log.count("weight_sync done") == log.count("every checksum verified") == 2
        last = f"model.layers.1.mlp.experts.{num_experts(moe) - 1}"
        server.moved = {f"{last}.up_proj.weight": f"{last}.gate_proj.weight"}
        with pytest.raises(
            SyncError, match=r"process 1 of 2: .*1 differ \(first: model.layers.1.mlp.experts.w13_weight"
        ):
            train(flags(moe, data, tmp_path / "wrong", **changes))
    finally:
        server.stop()


def test_every_process_of_a_tensor_parallel_server_is_verified_in_a_run(model, data, tmp_path):
    server = Loading("qwen3", num_kv_heads=1, tp_size=2)
    changes = {"rollout_external_engine_addrs": server.url, "update_weight_transport": "disk", "num_rollout": 1}
    changes |= {"log_level": "DEBUG"}
    try:
        assert train(flags(model, data, tmp_path / "run", **changes)) == 1
        log = (tmp_path / "run" / "run.log").read_text()
        assert log.count("weight_sync done") == log.count("every checksum verified") == 2
        server.moved = {"model.layers.1.mlp.up_proj.weight": "model.layers.1.mlp.gate_proj.weight"}
        with pytest.raises(SyncError, match=r"process 0 of 2: .*1 differ \(first: model.layers.1.mlp.gate_up_proj"):
            train(flags(model, data, tmp_path / "wrong", **changes))
    finally:
        server.stop()


@pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed")
def test_requests_go_through_sglang_router(model, data, servers, embedded, tmp_path):
    wanted = embedded[0]
    with router_process(servers) as url:
        (first, _), folder = sampled(
            model, data, tmp_path, sglang_router_ip="127.0.0.1", sglang_router_port=url.rpartition(":")[2],
            update_weight_transport="disk",
        )  # fmt: skip
    assert [s.tokens for s in first] == [s.tokens for s in wanted]
    assert audit(folder / "ledger.jsonl", finished=True).ok


def test_an_address_without_a_server_ends_the_run_before_it_starts(model, data, tmp_path):
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9"):
        train(flags(model, data, tmp_path / "run", rollout_external_engine_addrs=["127.0.0.1:9"]))


def test_a_server_without_routed_experts_is_rejected_for_routing_replay(model, data, tmp_path):
    moe = with_experts(model, tmp_path / "moe")
    server = Loading("qwen3_moe", enable_return_routed_experts=False)
    changes = {"rollout_external_engine_addrs": server.url, "use_rollout_routing_replay": True}
    try:
        with pytest.raises(ConfigError, match=r"(?s)--use-rollout-routing-replay .*--enable-return-routed-experts"):
            train(flags(moe, data, tmp_path / "run", **changes))
    finally:
        server.stop()


def test_a_server_with_several_http_processes_is_rejected(model, data, tmp_path):
    server = Loading("qwen3", tokenizer_worker_num=4)
    try:
        with pytest.raises(ConfigError, match=r"(?s) 4 HTTP processes.*--tokenizer-worker-num"):
            train(flags(model, data, tmp_path / "run", rollout_external_engine_addrs=server.url))
    finally:
        server.stop()


def test_disk_updates_to_a_server_with_a_draft_model_are_rejected(model, data, tmp_path):
    server = Loading("qwen3", speculative_algorithm="NGRAM")
    changes = {"rollout_external_engine_addrs": server.url, "update_weight_transport": "disk"}
    try:
        with pytest.raises(ConfigError, match=r"--update-weight-transport disk with the engine at .* NGRAM"):
            train(flags(model, data, tmp_path / "run", **changes))
    finally:
        server.stop()
