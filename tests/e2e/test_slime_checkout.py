"""slime's own examples train unchanged; needs a checkout: FURLONG_SLIME_DIR=DIR. Their services are stand-ins."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import re
import shutil
import sys
import threading
import types
from pathlib import Path

import pytest

from furlong.core import slime_modules
from furlong.data.audit import audit
from furlong.files.batch_file import load_batch
from furlong.files.sample_file import load_samples
from runs import argv_from_options, flags, is_finite, rows, train

SLIME = os.environ.get("FURLONG_SLIME_DIR")
STAND_INS = Path(__file__).parents[1] / "helpers" / "slime_stand_ins"
pytestmark = pytest.mark.skipif(SLIME is None, reason="needs a checkout of slime: set FURLONG_SLIME_DIR")


EXAMPLES = {  # folder on the path, generate function, reward function, keys of the prompts
    "search-r1": ("examples/search-r1", "generate_with_search.generate", "generate_with_search.reward_func"),
    "retool": ("examples/retool", "generate_with_retool.generate", "generate_with_retool.reward_func"),
    "tau-bench": ("examples/tau-bench", "generate_with_tau.generate", None),
    "multi_agent": (".", "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents", None),
    "strands": (
        ".",
        "examples.strands_sglang.generate_with_strands.generate",
        "examples.strands_sglang.generate_with_strands.reward_func",
    ),
    "coding_agent": (".", "examples.coding_agent_rl.generate.generate", None),
}


IMPORT = re.compile(r"^\s*(?:>>> )?(from slime[\w.]* import [\w, ]+|import slime[\w.]*)(?: as \w+)?\s*$", re.MULTILINE)
REFUSED = (
    "slime.utils.external_utils",
    "slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine",
)


def test_every_import_of_examples_and_documentation_has_a_verdict():
    slime_modules.install()
    files = [path for folder in ("examples", "scripts", "docs") for path in Path(str(SLIME), folder).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".md", ".sh")]
    statements = {match for text in texts for match in IMPORT.findall(text)}
    assert len(statements) > 20
    for statement in sorted(statements):
        if any(name in statement for name in REFUSED):
            with pytest.raises(slime_modules.NotInFurlongError, match=";"):
                exec(statement)
        else:
            exec(statement)


def test_a_copy_of_the_fully_async_rollout_trains(model, data, tmp_path, monkeypatch):
    copied = shutil.copyfile(f"{SLIME}/slime/rollout/fully_async_rollout.py", tmp_path / "copied.py")
    function = f"{copied}:generate_rollout_fully_async"
    argv = flags(model, data, tmp_path / "run", num_rollout=5, rollout_function_path=function, rm_type="random")
    assert train(argv) == 5
    result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
    assert result.ok, result.problems


@pytest.fixture
def rollout_buffer():
    """A stand-in of slime's rollout buffer, whose groups have one right answer of two; yields its URL."""
    numbers = itertools.count()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            question = {"role": "user", "content": "1+2="}
            rows = [
                {
                    "uid": f"u{number}",
                    "instance_id": f"i{number}",
                    "reward": reward,
                    "messages": [question, {"role": "assistant", "content": "3" if reward else "45"}],
                    "extra_info": {"timestamp": number, "finish_reason": "stop"},
                }
                for number in itertools.islice(numbers, 4)
                for reward in (0.0, 1.0)
            ]
            meta = {"total_samples": 8, "avg_reward": 0.5, "finished_groups": [rows[0]["instance_id"]]}
            body = json.dumps({"success": True, "data": {"data": rows, "meta_info": meta}}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.nightly
def test_the_example_of_a_rollout_buffer_trains(long_model, data, tmp_path, monkeypatch, rollout_buffer):
    monkeypatch.syspath_prepend(str(SLIME))
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    function = "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout"
    values = {"rollout_function_path": function, "rollout_buffer_url": rollout_buffer, "loss_mask_type": "qwen3"}
    argv = flags(
        long_model, data, tmp_path / "run", num_rollout=3, rollout_batch_size=2, n_samples_per_prompt=2, **values
    )
    assert train([*argv, "--fetch-trajectory-retry-times", "3"]) == 3
    result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
    assert result.ok, result.problems


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name, long_model, tmp_path, monkeypatch):
    folder, generate, reward = EXAMPLES[name]
    for path in (Path(str(SLIME)), Path(str(SLIME), folder), STAND_INS):
        monkeypatch.syspath_prepend(str(path))
    known = set(sys.modules)
    data = tmp_path / "prompts.jsonl"
    for name_of_variable in ("ADAPTER_PUBLIC_HOST", "ADAPTER_BIND_HOST"):
        monkeypatch.setenv(name_of_variable, "127.0.0.1")
    monkeypatch.setenv("ADAPTER_PORT", "0")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "image")
    for name_of_variable in ("SLIME_AGENT_NODE_TARBALL", "SLIME_AGENT_CC_TARBALL"):
        (tmp_path / "archive.tar").write_bytes(b"content")
        monkeypatch.setenv(name_of_variable, str(tmp_path / "archive.tar"))
    label = {"ground_truth": {"target": ["42"]}} if name == "search-r1" else "42"
    task = {"image": "img", "workdir": "/work", "problem_statement": "it fails"}
    tasks = [task | {"eval_cmd": ("true", "fails")[i % 2], "instance_id": f"task-{i}"} for i in range(8)]
    lines = [{"input": str(i), "label": label, "metadata": tasks[i]} for i in range(8)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {
        "hf_checkpoint": long_model,
        "prompt_data": data,
        "label_key": "label",
        "custom_generate_function_path": generate,
        "custom_rm_path": reward,
        "rm_type": None if reward or name == "coding_agent" else "random",
        "reward_key": "score" if name == "retool" else None,
        "num_rollout": 2,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 8,
        "rollout_max_context_len": 3072,
        # a turn ends before its limit; search-r1 sends its text again, without the stop token that it trains on
        "rollout_stop_token_ids": None if name == "search-r1" else [*range(5, 40)],
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 4096,
        "lr": 1e-3,
        "num_threads": 1,
        "no_use_tensorboard": True,
        "save_debug_train_data": f"{tmp_path}/batches/{{rollout_id}}",
        "save_debug_rollout_data": f"{tmp_path}/samples/{{rollout_id}}.safetensors",
        "output_dir": tmp_path / "run",
    }
    assert train(argv_from_options({k: v for k, v in values.items() if v is not None})) == 2
    for module in set(sys.modules) - known:
        if module.partition(".")[0] in ("examples", "tool_sandbox", "sglang", "tau_bench", "strands", "e2b"):
            del sys.modules[module]
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok
    assert all(is_finite(row) for row in rows(tmp_path / "run") if row["step"])
    for version, path in enumerate(sorted((tmp_path / "batches").glob("*"))):
        batch = load_batch(path)
        is_trained = batch.loss_masks == 1
        assert is_trained.any()
        if name != "strands":  # a random policy calls its tool by chance; the others have turns of the environment
            assert is_trained.all() == (name in ("multi_agent", "search-r1"))
        versions = set(batch.columns["token_versions"][is_trained].tolist())
        assert versions <= ({version, -1} if name == "tau-bench" else {version})
    samples = [s for g in load_samples(tmp_path / "samples" / "0.safetensors").groups for s in g.samples]
    assert not [s for s in samples if s.status == "failed"], [s.outcome for s in samples]
