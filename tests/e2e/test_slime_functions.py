"""Functions written for slime train without changes: the imports `slime.*`, and posts to `args.sglang_router_ip`."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path

import pytest

from furlong.data.audit import audit
from furlong.files.batch_file import load_batch
from furlong.files.sample_file import load_samples
from runs import flags, is_finite, ledger_events, rows, train, write_model

ZOO = Path(__file__).parents[1] / "helpers" / "slime_zoo.py"
OBSERVATION = " 42 "
CHAT = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def search(monkeypatch):
    """A stand-in of a search server; returns the queries that it got."""
    queries: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            queries.extend(json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"])
            body = json.dumps({"result": OBSERVATION}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 64  # of 5, connections that come at once are reset on a busy machine

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SEARCH_URL", f"http://127.0.0.1:{server.server_port}/retrieve")
    yield queries
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A model with a chat template that has a turn for each message."""
    folder = write_model(tmp_path_factory.mktemp("chat") / "model", max_position_embeddings=256)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT}))
    return folder


@pytest.fixture
def go(model, data, tmp_path):
    """Train two rollouts with functions of the zoo; returns the rows, the batches and the samples of each."""

    def run(generate, reward=None, **changes):
        values = {
            "custom_generate_function_path": generate and f"{ZOO}:{generate}",
            "custom_rm_path": reward and f"{ZOO}:{reward}",
            "rm_type": None if reward else "random",
            "save_debug_train_data": f"{tmp_path}/batches/{{rollout_id}}",
            "save_debug_rollout_data": f"{tmp_path}/samples/{{rollout_id}}.safetensors",
        }
        folder = tmp_path / "run"
        assert train(flags(model, data, folder, **values | changes)) == 2
        assert audit(folder / "ledger.jsonl", finished=True).ok
        shown = [row for row in rows(folder) if row["step"]]
        assert all(is_finite(row) for row in shown), shown
        batches = [load_batch(path) for path in sorted((tmp_path / "batches").glob("*"))]
        dumps = [load_samples(path) for path in sorted((tmp_path / "samples").glob("*"))]
        return shown, batches, [[s for g in dump.groups for s in g.samples] for dump in dumps]

    return run


def has_versions(batches, *, of=(0, 1)):
    """Whether trained tokens have the version of their rollout, and the others none."""
    for version, batch in zip(of, batches, strict=True):
        versions, is_trained = batch.columns["token_versions"], batch.loss_masks == 1
        if set(versions[is_trained].tolist()) != {version} or set(versions[~is_trained].tolist()) - {-1}:
            return False
    return True


def test_search_between_turns_is_masked(go, search):
    _, batches, samples = go("generate_with_search", "reward_of_search")
    assert len(search) == 2 * 16
    assert has_versions(batches)
    for sample in samples[0]:
        masked = [t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if not m]
        assert len(masked) == len(OBSERVATION)
    assert len({tuple(sample.tokens) for sample in samples[0]}) > 8


def test_attributes_of_a_sample_reach_its_reward_and_dumps(go):
    shown, batches, samples = go("generate_with_code", "reward_of_code")
    assert {sample.metadata["calls"] for sample in samples[0]} == {1}
    assert {sample.tool_call_count for sample in samples[0]} == {1}
    assert has_versions(batches)
    assert shown[0]["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_agents_fan_out_with_values_in_args(go):
    shown, batches, samples = go("generate_with_agents", rollout_max_context_len=64)
    assert len(batches[0]) == 16 * 6
    assert len(set(batches[0].rollout_ids.tolist())) == 16
    assert has_versions(batches)
    assert {sample.reward for sample in samples[0]} <= {0.0, 0.5}
    solvers = [tuple(sample.tokens) for sample in samples[0]]
    assert len(set(solvers)) > 16 * 2  # requests with one seed differ
    assert shown[0]["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_agents_of_both_apis_are_trained_through_adapters(chat_model, data, tmp_path):
    values = {
        "custom_generate_function_path": f"{ZOO}:generate_with_coding_agent",
        "rollout_max_context_len": 96,
        "rm_type": None,
        "save_debug_train_data": f"{tmp_path}/batches/{{rollout_id}}",
        "save_debug_rollout_data": f"{tmp_path}/samples/{{rollout_id}}.safetensors",
    }
    assert train(flags(chat_model, data, tmp_path / "run", **values)) == 2
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok
    assert has_versions([load_batch(path) for path in sorted((tmp_path / "batches").glob("*"))])
    samples = [s for g in load_samples(tmp_path / "samples" / "0.safetensors").groups for s in g.samples]
    assert {sample.reward for sample in samples} == {0.0, 1.0, 2.0}
    assert {(sample.metadata["exit_code"], sample.metadata["session_turns"]) for sample in samples} == {(0, 2)}
    assert all(0 < sum(sample.loss_mask) < sample.response_length for sample in samples)
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows(tmp_path / "run") if row["step"])


def test_a_function_in_the_form_of_miles_fans_out(go):
    _, batches, samples = go("generate_in_halves")
    for version, batch in enumerate(batches):
        assert set(batch.columns["token_versions"][batch.loss_masks == 1].tolist()) == {version}
    assert len(samples[0]) == 2 * 16
    for first, second in zip(samples[0][::2], samples[0][1::2], strict=True):
        assert second.tokens[: len(first.tokens)] == first.tokens
        assert sum(first.loss_mask) + sum(second.loss_mask) == second.response_length


def test_a_new_sample_without_log_probs_is_trained_on(go):
    _, batches, samples = go("generate_with_user")
    assert {sample.metadata["steps"] for sample in samples[0]} == {2}
    share = batches[0].loss_masks.mean()
    assert 0 < share < 1


def test_requests_of_another_client_get_weight_versions(go):
    shown, batches, _ = go("generate_with_client")
    assert has_versions(batches)
    assert shown[0]["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_a_whole_rollout_of_the_user(go, data):
    shown, batches, _ = go(
        None,
        rollout_function_path=f"{ZOO}:generate_rollout",
        custom_generate_function_path=None,
        rm_type="random",
        save_debug_rollout_data=None,
        eval_interval=1,
        eval_prompt_data=["held_out", data],
    )
    assert [row["rollout/mine"] for row in shown] == [1, 2]
    assert "source" not in shown[0]
    assert shown[0]["eval/held_out"] == 0.5
    assert has_versions(batches)
    assert len(batches[0]) == 16


def five_rollouts(model, data, tmp_path, function, **changes):
    """Train 3 rollouts, then 2 more after a resume; return the events of the ledger, which is audited."""
    for num_rollout, more in ((3, ()), (5, ("--load", tmp_path / "save"))):
        argv = flags(
            model, data, tmp_path / "run", *more, num_rollout=num_rollout, save=tmp_path / "save", save_interval=1,
            rollout_function_path=function, **{"rm_type": "random"} | changes,
        )  # fmt: skip
        assert train(argv) == num_rollout
        result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
        assert result.ok, result.problems
    assert all(is_finite(row) for row in rows(tmp_path / "run") if row["step"])
    return ledger_events(tmp_path / "run")


def test_groups_that_wait_from_one_call_to_the_next_are_trained_once(model, data, tmp_path):
    events = five_rollouts(model, data, tmp_path, f"{ZOO}:generate_rollout_between_calls")
    assert any(event["e"] == "held" for event in events)
    assert any((event["e"], event.get("why")) == ("returned", "resumed") for event in events)  # what the worker had


def test_groups_of_another_service_are_issued_by_the_function(model, tmp_path):
    events = five_rollouts(
        model, None, tmp_path, f"{ZOO}:generate_rollout_from_records", disable_rollout_global_dataset=True,
        rm_type=None, label_key=None,
    )  # fmt: skip
    assert {event["ep"] for event in events if event["e"] == "issued"} == {-2}


def test_fully_async_generates_ahead(go):
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    shown, batches, _ = go(None, custom_generate_function_path=None, rollout_function_path=path, num_rollout=2)
    assert shown[1]["rollout/staleness/max"] > 0
    assert {int(batch.columns["token_versions"].max()) for batch in batches} == {0}


@pytest.mark.nightly
def test_engine_servers_without_a_router_answer_too(go, engines):
    shown, batches, _ = go("generate_with_code", "reward_of_code", rollout_num_gpus=1)
    assert has_versions(batches)
    assert shown[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
