import json
import re
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from furlong.core.sample import Group
from furlong.errors import ConfigError, DataError
from furlong.files.sample_file import save_samples
from furlong.quickstart.quickstart import model_folder
from furlong.view.page_app import FILES, STATIC, PageApp
from furlong.view.page_file import MODULES, page_text, write_page
from furlong.view.run_pages import RunPages
from furlong.view.run_reader import RunReader, open_runs
from furlong.view.sample_page import load_decoder, token_pieces
from furlong.view.turns import last_user_text, prompt_turns, response_turns
from recorded_runs import HOSTILE, sample_of, write_run


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path):
    return RunReader(write_run(tmp_path / "run"))


@pytest.fixture
def client(run):
    app = PageApp([run], "secret")
    app.pages[0].samples.update()
    return TestClient(app.app, cookies={"furlong_view": "secret"})


def get(client, path, **parameters):
    reply = client.get(f"/api/{path}", params=parameters)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_every_request_needs_the_token(run):
    client = TestClient(PageApp([run], "secret").app, follow_redirects=False)
    for path in ("/", "/static/app.js", "/api/runs", "/api/config/0", "/?token=wrong", "/?token="):
        assert client.get(path).status_code == 403
    reply = client.get("/?token=secret")
    assert reply.status_code == 303
    assert reply.headers["location"] == "/"
    assert {"HttpOnly", "SameSite=strict"} <= set(reply.headers["set-cookie"].split("; "))
    assert client.get("/api/runs").status_code == 200


def test_every_answer_has_a_policy_that_allows_no_inline_script(client):
    for path in ("/", "/static/app.css", "/api/runs", "/api/nothing/0", "/static/none.js"):
        headers = client.get(path).headers
        assert "script-src 'self';" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_only_files_of_the_page_are_served(client):
    for name in FILES:
        assert client.get(f"/static/{name}").status_code == 200
    for name in ("../page_app.py", "vendor/uPlot.LICENSE", "%2e%2e/page_app.py", "/etc/passwd"):
        assert client.get(f"/static/{name}").status_code == 404
    assert {path.name for path in STATIC.iterdir() if path.name.endswith(".js")} == {
        n for n in FILES if "/" not in n and n.endswith(".js")
    }


@pytest.mark.parametrize("path", ["metrics/7", "unknown/0", "metrics/x"])
def test_an_unknown_run_or_answer_is_not_found(client, path):
    assert client.get(f"/api/{path}").status_code == 404


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("samples/0", {"step": "x"}),
        ("samples/0", {"step": str(1 << 63)}),
        ("samples/0", {"reward_min": "many"}),
        ("sample/0", {"file": "../../config.json", "pos": "0"}),
        ("sample/0", {"file": "0.safetensors", "pos": "99"}),
        ("metrics/0", {"after": "now"}),
    ],
)
def test_a_wrong_parameter_is_explained(client, path, parameters):
    reply = client.get(f"/api/{path}", params=parameters)
    assert reply.status_code == 400
    assert ";" in reply.json()["error"]


def test_metrics_are_columns_in_which_unmeasured_values_are_null(client):
    answer = get(client, "metrics/0", names="eval/held,rollout/raw_reward,none")
    assert answer["steps"] == [0, 1, 2, 3, 4]
    assert answer["columns"] == {
        "eval/held": [0, None, 0.2, None, 0.4],
        "rollout/raw_reward": [None, 0.2, 0.4, 0.6, 0.8],
    }
    assert get(client, "metrics/0", names="rollout/raw_reward", after=3)["steps"] == [4]


def test_steps_of_a_run_in_progress_are_read_as_they_come(run):
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "new": 1.0}\n{"step": 6, "ne')
    run.refresh()
    assert run.metrics(["new"], after=3) == {"steps": [4, 5], "columns": {"new": [None, 1.0]}}
    rows = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    replaced = run.folder / "draft"
    replaced.write_text("".join(rows[:3]))
    replaced.rename(run.folder / "metrics.jsonl")  # as a resume rolls back
    run.refresh()
    assert run.metrics()["steps"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("ended", "state"), [("end", "finished"), ("failed", "failed"), ("stopped", "stopped"), ("", "killed")]
)
def test_the_state_of_a_run_is_that_of_its_last_event(tmp_path, ended, state):
    folder = write_run(tmp_path / ended, num_steps=1, ended="")
    more = {"failed": {"error": "E", "message": "m"}, "stopped": {"message": "by Ctrl-C"}}.get(ended, {})
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": ended, **more}) + "\n" if ended else "")
    run = RunReader(folder)
    assert run.state() == state
    shutil.rmtree(folder)
    assert run.state() == "deleted"
    client = TestClient(PageApp([run], "secret").app, cookies={"furlong_view": "secret"})
    assert "config.json" in client.get("/api/config/0").json()["error"]


def test_a_model_from_the_hub_is_shown_by_its_id(tmp_path):
    model = str(tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de289a04d12100db370d81485cdf75e47ca")
    assert RunReader(write_run(tmp_path / "a", hf_checkpoint=model)).summary()["model"] == "Qwen/Qwen3-0.6B"


def test_diagnoses_are_shown_once_with_their_explanation(client):
    (diagnosis,) = get(client, "findings/0")["diagnoses"]
    assert diagnosis["id"] == "REW02"
    assert diagnosis["steps"] == [1, 2]
    assert diagnosis["checked"]


def test_samples_are_filtered_and_paged(client):
    assert get(client, "sample_facts/0")["num_samples"] == 17
    everything = get(client, "samples/0")
    assert everything["total"] == 16  # without the evaluation
    assert [row["step"] for row in everything["rows"]] == sorted(
        (row["step"] for row in everything["rows"]), reverse=True
    )
    assert get(client, "samples/0", step=2, reward_min=0.5)["total"] == 2
    assert get(client, "samples/0", text="ANSWER 3")["total"] == 1
    assert get(client, "samples/0", text="%")["total"] == 0
    assert get(client, "samples/0", status="failed")["total"] == 0
    (row,) = get(client, "samples/0", set="held")["rows"]
    assert row["response"] == "held out"
    assert len(get(client, "samples/0", offset=10)["rows"]) == 6


def test_a_sample_has_its_tokens_group_and_facts(client):
    (row,) = get(client, "samples/0", text="answer 3")["rows"]
    sample = get(client, "sample/0", file=row["file"], pos=row["pos"])
    assert sample["tokens"]["num_prompt"] == 3
    assert sample["tokens"]["engine"] == [-0.5, -2.0]
    assert sample["tokens"]["versions"] == [3, 3]
    assert len(sample["tokens"]["pieces"]) == 5
    assert [member["reward"] for member in sample["members"]] == [0.0, 1.0]


def test_turns_of_an_agent_come_with_all_leaves_of_the_episode(client):
    sample = get(client, "sample/0", file="0.safetensors", pos=0)
    assert [leaf["messages"][-1]["content"] for leaf in sample["leaves"]] == ["two", "2"]
    assert sample["leaves"][0]["messages"][1]["more"] == {"tool_calls": [{"name": "calculator"}]}


def test_new_changed_and_deleted_dumps_change_the_index(run):
    pages = RunPages(run)
    assert pages.samples.update() == 5
    assert pages.samples.update() == 0
    files = sorted((run.folder / "rollouts").iterdir())
    files[0].unlink()
    files[1].write_bytes(b"damaged")
    assert pages.samples.update() == 1
    facts = pages.samples.facts()
    assert facts["num_samples"] == 9
    assert "1.safetensors" in facts["problems"][0]


@pytest.mark.parametrize(("file", "where"), [("9", "step 10"), ("eval_9", "the evaluation of step 9")])
def test_a_link_to_a_sample_that_was_removed_names_its_step(tmp_path, file, where):
    pages = RunPages(RunReader(write_run(tmp_path / "run", saves_samples=False, keep_samples=3)))
    with pytest.raises(DataError, match=rf"{where} are not kept \(--keep-samples 3\)"):
        pages.answer("sample", {"file": f"{file}.safetensors"})


def test_a_moved_run_shows_its_samples(run, tmp_path):
    moved = run.folder.rename(tmp_path / "elsewhere")
    pages = RunPages(RunReader(moved))
    pages.samples.update()
    assert pages.samples.page({})["total"] == 16


def test_relative_paths_are_those_of_the_folder_in_which_the_run_was_started(tmp_path, monkeypatch):
    (tmp_path / "model").symlink_to(model_folder())
    monkeypatch.chdir(tmp_path)
    write_run(Path("outputs/near"), hf_checkpoint="model", save_debug_rollout_data="dumps/{rollout_id}.safetensors")
    save_samples("dumps/0.safetensors", 0, [Group(0, [sample_of(0, 0, reward=1.0)])])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pages = RunPages(RunReader(tmp_path / "outputs" / "near"))
    pages.samples.update()
    assert pages.answer("sample", {"file": "0.safetensors", "pos": "0"})["tokens"]["pieces"]


def test_groups_show_what_became_of_them(client):
    flow = get(client, "flow/0")
    assert (flow["issued"], flow["trained"], flow["dropped"], flow["problems"]) == (9, 8, {"zero_std": 1}, [])
    assert [row["state"] for row in get(client, "groups/0")["rows"]] == ["dropped"] + ["trained"] * 8
    (row,) = get(client, "groups/0", state="dropped")["rows"]
    assert (row["group"], row["reason"], row["step"]) == (2, "zero_std", None)
    assert get(client, "groups/0", group=0)["rows"][0]["step"] == 1


def test_flags_have_their_source(client):
    rows = {row["flag"]: row for section in get(client, "config/0").values() for row in section}
    assert rows["--num-rollout"]["source"] == "flag"
    assert rows["--num-rollout"]["value"] == 4
    assert rows["--lr"]["help"]


def test_the_timeline_has_the_phases_of_the_last_steps(client):
    answer = get(client, "timeline/0", first=2, last=3)
    boxes = {track["name"]: track["boxes"] for track in answer["tracks"]}
    assert [name for _, _, name in boxes["steps"]] == ["step 2", "step 3"]
    assert boxes["trainer waits"][0][:2] == [0.0, 0.5]
    assert answer["steps"] == [0, 4]
    assert not answer["traced"]


def test_the_timeline_has_the_spans_of_a_trace(run):
    folder = run.folder / "trace"
    folder.mkdir()
    start = {event["step"]: event["time"] for event in run.events if event["event"] == "step"}[2] * 1e6
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "driver"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "MainThread"}},
        {"ph": "X", "name": "load", "ts": start, "dur": 2e5, "pid": 1, "tid": 1, "args": {"step": 2}},
        {"ph": "b", "name": "request", "id": "1-0", "ts": start, "pid": 1, "tid": 1, "args": {}},
        {"ph": "e", "name": "request", "id": "1-0", "ts": start + 1e5, "pid": 1, "tid": 1},
        {"ph": "X", "name": "before", "ts": 0, "dur": 5, "pid": 1, "tid": 1, "args": {}},
    ]
    (folder / "driver-1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"ph": "X", "na')
    answer = RunPages(run).answer("timeline", {})
    names = {track["name"]: [name for _, _, name in track["boxes"]] for track in answer["tracks"]}
    assert answer["traced"]
    assert names["driver: MainThread"] == ["load (step 2)"]
    assert names["driver: request in flight"] == ["request"]


def test_pieces_of_tokens_join_to_the_text():
    decoder = load_decoder(Path(), {"hf_checkpoint": str(model_folder())})
    assert decoder is not None
    ids = list(range(3, 12))
    assert "".join(token_pieces(decoder, ids)) == decoder.decode(ids, skip_special_tokens=False)


def test_a_character_of_several_tokens_is_with_the_last_one():
    class Bytes:
        def decode(self, ids, skip_special_tokens=True):
            return bytes(ids).decode("utf-8", "replace")

    assert token_pieces(Bytes(), "aé😀b".encode()) == ["a", "", "é", "", "", "", "😀", "b"]
    assert "".join(token_pieces(Bytes(), b"\xff\xfe\xfd\xfc\xfba")).endswith("a")


def test_a_folder_of_runs_has_a_list_of_them_to_which_later_ones_are_added(tmp_path):
    outputs = tmp_path / "outputs"
    write_run(outputs / "a", num_steps=1)
    runs = open_runs([outputs])
    app = PageApp(runs, "secret", folders=[outputs])
    write_run(outputs / "b", num_steps=2)
    app.find_new_runs()
    app.find_new_runs()
    client = TestClient(app.app, cookies={"furlong_view": "secret"})
    assert [(row["name"], row["last_step"], row["last"]["eval/held"]) for row in get(client, "runs")] == [
        ("a", 1, 0.0),
        ("b", 2, 0.2),
    ]
    with pytest.raises(ConfigError, match=str(tmp_path / "none")):
        open_runs([outputs, tmp_path / "none"])


TEMPLATES = [
    ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "system"),
    ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", "user"),
    ("<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "user"),
    ("<|start|>system<|message|>S<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant", "system"),
    ("[gMASK]<sop><|user|>\nHi<|assistant|>\n", "user"),
    ("<｜User｜>Hi<｜Assistant｜>", "user"),
]


@pytest.mark.parametrize(("text", "first"), TEMPLATES)
def test_rendered_prompts_are_shown_as_turns(text, first):
    turns = prompt_turns(text)
    assert turns[0]["role"] == first
    assert turns[-1]["role"] in ("user", "assistant")
    assert last_user_text(text).strip() == "Hi"


def test_only_what_the_environment_added_splits_a_response():
    faked = "<|im_start|>user\nfaked<|im_end|>"
    assert [turn["role"] for turn in response_turns(faked, [faked], [1])] == ["assistant"]
    pieces = ["call", "<|im_end|>", "\n<|im_start|>tool\n", "4", "<|im_end|>\n<|im_start|>assistant\n", faked]
    turns = response_turns("".join(pieces), pieces, [1, 1, 0, 0, 0, 1])
    assert [(turn["role"], turn["content"][:4]) for turn in turns] == [
        ("assistant", "call"),
        ("tool", "4"),
        ("assistant", "<|im"),
    ]


def test_the_exported_page_contains_no_text_as_markup(run, tmp_path):
    text = page_text([run])
    assert HOSTILE not in text
    assert text.count("</script>") == 3
    assert "answer 3" in text
    embedded = json.loads(re.search(r'id="embedded">(.*?)</script>', text, re.DOTALL)[1])
    assert HOSTILE in [row["response"] for row in embedded["answers"][0]["samples"]["rows"]]
    assert write_page([run], tmp_path / "page.html") == (tmp_path / "page.html").stat().st_size
    with pytest.raises(ConfigError, match="--export"):
        write_page([run], tmp_path / "none" / "page.html")


def test_modules_of_the_page_join_to_one():
    order: list[str] = []
    names: list[str] = []
    for name in MODULES:
        text = (STATIC / name).read_text()
        assert {path.removeprefix("./") for path in re.findall(r'from "([^"]+)"', text)} <= set(order), name
        names += re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text, re.MULTILINE)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
        order.append(name)
    assert len(names) == len(set(names))
