"""Whole runs on engine servers that the run starts for itself."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from fakes_engine import run as run_engine
from furlong.data.audit import audit
from furlong.errors import ConfigError, EngineError
from furlong.inference.embedded import EmbeddedEngine
from furlong.interfaces import SamplingParams
from furlong.training.worker import RoundWorker
from runs import flags, rows, sampled, train, write_model

ROUTER = {"router.log"} if importlib.util.find_spec("sglang_router") else set()


def events(folder: Path, name: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == name]


def children_of_this_process() -> list[str]:
    return [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True) if "serve" in p.cmdline()]


def test_two_started_servers_reproduce_the_run_of_the_embedded_engine(model, data, embedded, tmp_path):
    (samples, _), folder = sampled(
        model, data, tmp_path, engine="embedded", rollout_num_gpus=2, update_weight_transport="disk",
        sglang_api_key="secret", sglang_router_strategy="manual" if ROUTER else "direct", verify_weights="during",
    )  # fmt: skip
    assert [s.tokens for s in samples] == [s.tokens for s in embedded[0]]
    for got, want in zip(samples, embedded[0], strict=True):
        assert got.rollout_log_probs == pytest.approx(want.rollout_log_probs, abs=1e-5)
        assert got.token_versions == want.token_versions
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows(folder))
    first = rows(folder)[0]
    of_each = first["perf/tokens_per_gpu_per_sec"] * first["perf/rollout_time"]
    assert of_each == pytest.approx(sum(s.response_length for s in samples) / 2)
    assert audit(folder / "ledger.jsonl", finished=True).ok
    assert {path.name for path in (folder / "logs").iterdir()} == {"engine-0.log", "engine-1.log"} | ROUTER
    assert [event["num"] for event in events(folder, "engines_started")] == [2]
    assert "secret" not in (folder / "run.log").read_text() + (folder / "config.json").read_text()
    assert children_of_this_process() == []
    log = (folder / "run.log").read_text()
    assert [f"weight_sync verified: version {n}, every checksum verified" in log for n in range(3)] == [True] * 3


KEYS = """
import httpx, pathlib, psutil
from furlong import policy

ANSWERS = set()


async def generate(args, sample, sampling_params):
    words = [p.cmdline() for p in psutil.Process().children(recursive=True)]
    port = next(each[each.index("--port") + 1] for each in words if "serve" in each and "--port" in each)
    turn = await policy().generate(sample.tokens, **sampling_params)
    sample.append_response_tokens(tokens=turn.tokens, log_probs=turn.log_probs, text=turn.text, version=turn.versions)
    sample.reward = float(len(turn.tokens) % 2)
    gateway = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
        for path in ("/generate", "/pause_generation", "/update_weights_from_disk", "/server_info"):
            ANSWERS.add(("engine", path, (await client.post(f"http://127.0.0.1:{port}{path}", json=body)).status_code))
            ANSWERS.add(("run", path, (await client.post(gateway + path, json=body)).status_code))
    ANSWERS.add(("args", "sglang_api_key", args.sglang_api_key))
    pathlib.Path("ANSWERS").write_text(repr(sorted(ANSWERS)))
    return sample
"""


def test_engines_have_a_random_key_and_what_functions_post_to_has_none(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FURLONG_API_KEY", raising=False)
    (tmp_path / "keys.py").write_text(KEYS)
    function = {"custom_generate_function_path": f"{tmp_path}/keys.py:generate", "rm_type": None}
    train(flags(model, data, tmp_path / "run", engine="embedded", rollout_num_gpus=1, num_rollout=1, **function))
    answers = eval((tmp_path / "ANSWERS").read_text())
    assert {status for who, _, status in answers if who == "engine"} == {401}
    assert ("args", "sglang_api_key", None) in answers
    served = {path: status for who, path, status in answers if who == "run"}
    assert served == {"/generate": 200, "/pause_generation": 404, "/update_weights_from_disk": 404, "/server_info": 404}


def test_a_colocated_server_reproduces_the_run_of_the_embedded_engine(model, data, embedded, tmp_path, engines):
    (samples, _), folder = sampled(
        model, data, tmp_path, engine="embedded", rollout_num_gpus=1, colocate=True, log_level="DEBUG"
    )
    assert [s.tokens for s in samples] == [s.tokens for s in embedded[0]]
    for row in rows(folder):
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert row["perf/sleep_time"] > 0
        assert row["perf/wake_up_time"] > 0
        assert row["perf/onload_rollout_time"] > 0
        assert row["memory/trainer_moved_gib"] == 0  # its device is the host
    log = (folder / "run.log").read_text()
    assert log.index("perf/sleep_time") < log.index("starting 1 engines") < log.index("perf/wake_up_time")
    assert log.count("by ipc") == 3
    assert "ray:" not in log
    assert engines.alive() == []


@pytest.mark.parametrize("is_tolerant", [False, True])  # nothing is lost yet, and a wrong flag would fail each time
def test_a_server_that_fails_to_start_ends_the_run_with_its_log(is_tolerant, model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "furlong.inference.supervisor.launch.argv_from_options",
        lambda values: ["--model-path", "/no/such/model"],
    )
    two = {"rollout_num_gpus": 2, "sglang_log_dir": tmp_path / "logs", "use_fault_tolerance": is_tolerant}
    with pytest.raises(EngineError, match=r"(?s)engine \d.* ended with exit code \d; the last lines.*/no/such/model"):
        train(flags(model, data, tmp_path / "run", **two))
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"engine-0.log", "engine-1.log"}
    assert children_of_this_process() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "needs a CUDA GPU"),
        (
            {"sglang_device": "cpu", "update_weight_transport": "ipc"},
            "--sglang-device cpu with --update-weight-transport ipc",
        ),
        ({"sglang_device": "cpu", "colocate": True, "rollout_num_gpus": None}, "remove --colocate"),
    ],
)
def test_sglang_without_a_gpu_is_rejected_before_anything_is_started(model, data, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        train(flags(model, data, tmp_path / "run", **{"engine": "sglang", "rollout_num_gpus": 1} | changes))


@pytest.mark.skipif(not ROUTER, reason="sglang-router is not installed")
@pytest.mark.nightly
def test_a_second_model_has_its_own_router_keeps_its_weights_and_is_restarted(
    model, data, embedded, tmp_path, monkeypatch, engines
):
    judge, groups = write_model(tmp_path / "judge", seed=7, width=48), tmp_path / "engines.yaml"
    group = "server_groups: [{worker_type: regular, num_gpus: 1}]"
    groups.write_text(f"sglang:\n  - {{name: judge, model_path: {judge}, {group}}}\n  - {{name: actor, {group}}}\n")
    train_part, folder = RoundWorker.train_part, tmp_path / "run"

    def train_and_kill(worker, part, **options):
        """Kill the judge while the first rollout is trained on, and wait until it is there again."""
        deadline = time.monotonic() + 60
        if part.batch.rollout_id == 0:
            os.kill(engines.of(judge), signal.SIGKILL)
            while not events(folder, "engine_restarted"):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        return train_part(worker, part, **options)

    monkeypatch.setattr(RoundWorker, "train_part", train_and_kill)
    (samples, later), _ = sampled(
        model, data, tmp_path, engine="embedded", sglang_config=groups, use_fault_tolerance=True, rm_type=None,
        custom_rm_path="hooks_zoo.reward_by_judge",
    )  # fmt: skip
    assert [s.tokens for s in samples] == [s.tokens for s in embedded[0]]
    samples = [*samples, *later]
    assert {s.metadata["judge"][0] for s in samples} == {"0"}  # as its folder has them; the actor went on
    assert [s.reward for s in samples] == [float(s.metadata["judge"][1][0] % 2) for s in samples]
    alone = EmbeddedEngine(judge, dtype=torch.float32)
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0)
    asked = [samples[i].tokens[-4:] for i in (0, -1)]
    answers = run_engine(alone, lambda: asyncio.gather(*(alone.generate(tokens, greedy) for tokens in asked)))
    assert [answer.tokens for answer in answers] == [samples[i].metadata["judge"][1] for i in (0, -1)]
    [lost], [back] = events(folder, "engine_lost"), events(folder, "engine_restarted")
    assert (lost["engine"], back["engine"], back["version"]) == (0, 0, None)
    assert {path.name for path in (folder / "logs").iterdir()} >= {"engine-1.log", "router.log", "router-judge.log"}
    assert engines.alive() == []
