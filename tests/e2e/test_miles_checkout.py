"""Functions of Miles's examples train unchanged; needs a checkout: FURLONG_MILES_DIR=DIR. Services are stand-ins."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from furlong.data.audit import audit
from furlong.files.batch_file import load_batch
from furlong.files.sample_file import load_samples
from runs import flags, is_finite, rows, train

MILES = os.environ.get("FURLONG_MILES_DIR", "")
STAND_INS = Path(__file__).parents[1] / "helpers" / "slime_stand_ins"
pytestmark = [
    pytest.mark.skipif(not MILES, reason="needs a checkout of Miles: set FURLONG_MILES_DIR"),
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # megatron-core calls what PyTorch has deprecated
]

_MIS = "examples.infra_features.train_infer_mismatch_helper.mis"
_AGENTIC = "miles.rollout.generate_hub.agentic_tool_call.generate"
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {  # folder on the path, and flags
    "search-r1": (
        "examples/experimental/search-r1",
        {
            "custom_generate_function_path": "generate_with_search.generate",
            "custom_rm_path": "generate_with_search.reward_func",
            "rollout_stop_token_ids": None,
        },
    ),
    "multi_agent": (
        ".",
        {
            "custom_generate_function_path": "examples.experimental.multi_agent.rollout_with_multi_agents."
            "generate_with_multi_agents"
        },
    ),
    "self-distillation": (
        ".",
        {"custom_rm_path": "examples.on_policy_distillation.qwen3_5_35b_selfdistill.rm.reward_func"},
    ),
    "nemo-gym": (
        "examples/experimental/nemo-gym",
        {
            "custom_generate_function_path": _AGENTIC,
            "agent_function_path": "nemogym_agent_function.run",
            "custom_rm_path": "nemogym_generate.reward_func",
            "dynamic_sampling_filter_path": "miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted",
        },
    ),
    "compact": (".", {"custom_generate_function_path": f"{MILES}/tests/manual/compact_split_generate.py:generate"}),
    "retool": (".", {"custom_rm_path": "examples.retool_v2.tool_sandbox.reward_func", "reward_key": "score"}),
    "mis": (".", {"use_tis": True, "custom_tis_function_path": f"{_MIS}.compute_mis_weights_fsdp"}),
    "mis on Megatron": (
        ".",
        {
            "use_tis": True,
            "train_backend": "megatron",
            "custom_tis_function_path": f"{_MIS}.compute_mis_weights_with_cp",
        },
    ),
    "Dr. GRPO": (
        ".",
        {
            "train_backend": "megatron",
            "custom_pg_loss_reducer_function_path": "examples.experimental.DrGRPO.custom_reducer:get_pg_loss_reducer",
        },
    ),
}


class TaskServer(http.server.BaseHTTPRequestHandler):
    """A stand-in of NeMo Gym: plays two turns with the policy at `policy_base_url`, and returns a reward."""

    def do_POST(self):
        task = json.loads(self.rfile.read(int(self.headers["content-length"])))
        messages = [{"role": "user", "content": "fix it"}]
        for _ in range(2):
            body = {"model": "m", "messages": messages, "max_tokens": 5}
            reply = httpx.post(f"{task['policy_base_url']}/chat/completions", json=body, timeout=60, trust_env=False)
            said = reply.raise_for_status().json()["choices"][0]["message"]
            messages += [said, {"role": "user", "content": "go on"}]
        data = json.dumps({"reward": float(len(said["content"] or "") % 2), "metadata": {"resolved": True}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64


@pytest.fixture
def task_server(monkeypatch):
    with Server(("127.0.0.1", 0), TaskServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NEMO_GYM_URL", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name, long_model, tmp_path, monkeypatch, task_server):
    folder, values = EXAMPLES[name]
    for path in (Path(MILES), Path(MILES, folder), STAND_INS):
        monkeypatch.syspath_prepend(str(path))
    if "use_tis" in values:
        example = f"{MILES}/{_MIS.replace('.', '/')}.yaml"
        values = {**values, "custom_config_path": shutil.copyfile(example, tmp_path / "mis.yaml")}
    known, data = set(sys.modules), tmp_path / "prompts.jsonl"
    label = {"ground_truth": {"target": ["42"]}} if name == "search-r1" else "42"
    lines = [{"input": str(i), "label": label, "metadata": {"instance_id": f"task-{i}"}} for i in range(8)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_context_len": 3072,
        "rollout_stop_token_ids": [*range(5, 40)],
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 4096,
        "rm_type": None if "custom_rm_path" in values else "random",
        "save_debug_train_data": f"{tmp_path}/batches/{{rollout_id}}",
        "save_debug_rollout_data": f"{tmp_path}/samples/{{rollout_id}}.safetensors",
    }
    assert train(flags(long_model, data, tmp_path / "run", **common | values)) == 2
    for module in set(sys.modules) - known:
        if module.partition(".")[0] == "examples":
            del sys.modules[module]
    result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
    assert result.ok, result.problems
    assert all(is_finite(row) for row in rows(tmp_path / "run") if row["step"])
    assert all((load_batch(path).loss_masks == 1).any() for path in (tmp_path / "batches").glob("*"))
    samples = [s for g in load_samples(tmp_path / "samples" / "0.safetensors").groups for s in g.samples]
    assert not [s for s in samples if s.status == "failed"], [s.outcome for s in samples]
    assert len(samples) in {"multi_agent": (20,), "compact": range(5, 9)}.get(name, (4,))
