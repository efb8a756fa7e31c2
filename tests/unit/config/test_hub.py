"""Names on the Hub, against a hub on loopback: what is downloaded, what the cache has, and what errors say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.config.checks.value_checks import model_problem, prompt_file_problem
from furlong.config.command_line import command_of, examine
from furlong.config.engine_groups import served_models
from furlong.config.hub import HubName, hub_name, resolve_model
from furlong.errors import ConfigError
from loopback_hub import LoopbackHub, loopback_hub, use_hub

CARD = "---\nconfigs:\n" + "".join(
    f"- config_name: {config}\n  data_files:\n"
    + "".join(f"  - split: {split}\n    path: {config}/{split}.jsonl\n" for split in ("train", "test"))
    for config in ("main", "extra")
)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with loopback_hub() as served:
        use_hub(monkeypatch, served, tmp_path / "hf")
        yield served


def resolved_data(hub: LoopbackHub, home: Path, *texts: str, offline: bool = False) -> list[str]:
    """Resolve names of data sets in another process, as datasets reads its variables once; an error is its text."""
    code = """
import json, sys
from furlong.config.hub import ConfigError, resolve_data
def resolved(text):
    try:
        return resolve_data("--prompt-data", text)
    except ConfigError as error:
        return str(error)
print(json.dumps([resolved(text) for text in sys.argv[1:]]))
"""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
    done = subprocess.run([sys.executable, "-c", code, *texts], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "modeling.py"):
        (folder / name).write_text("{}")
    return folder


def add_data(hub: LoopbackHub, folder: Path) -> str:
    for config in ("main", "extra"):
        (folder / config).mkdir(parents=True)
        for split, count in (("train", 5), ("test", 2)):
            lines = [json.dumps({"question": f"{config} {i}", "answer": str(i)}) + "\n" for i in range(count)]
            (folder / config / f"{split}.jsonl").write_text("".join(lines))
    (folder / "README.md").write_text(CARD + "---\n")
    return hub.add("datasets", "openai/gsm8k", folder)


def offline(monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_names_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("here/model", "openai/gsm8k"):
        Path(folder).mkdir(parents=True)
    Path("odd").mkdir()
    Path("odd/name:train").write_text("")
    for text, kind, expected in (
        ("Qwen/Qwen3-0.6B", "model", HubName("model", "Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", "model", HubName("model", "Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("here/other@main", "model", HubName("model", "here/other")),  # said to be a name
        ("a/b:train", "dataset", HubName("dataset", "a/b", "main", "train")),
        ("a/b@v1:test?config=c@[2:]", "dataset", HubName("dataset", "a/b", "v1", "test", "c")),
        ("openai/gsm8k:train", "dataset", HubName("dataset", "openai/gsm8k", "main", "train")),
        *((path, "model", None) for path in ("here/model", "here/other", "model", "/a/b", "a/b/c", "a/b:train")),
        *((path, "dataset", None) for path in ("openai/gsm8k", "a/b.jsonl", "odd/name:train", "reasoning-gym:x")),
        ("envs/mine.py:Class", "dataset", None),
    ):
        assert hub_name(text, kind) == expected, text


def test_a_model_is_downloaded_once_without_pickle_and_code(hub, repository, monkeypatch):
    commit = hub.add("models", "o/m", repository)
    folder = Path(resolve_model("--hf-checkpoint", "o/m"))
    assert folder.name == commit
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    hub.requests.clear()
    assert resolve_model("--hf-checkpoint", "o/m") == str(folder)
    assert hub.requests == []
    offline(monkeypatch)
    assert resolve_model("--hf-checkpoint", "o/m") == str(folder)


def test_a_download_is_reported_where_no_bar_shows_it(hub, repository, monkeypatch, capsys):
    hub.add("models", "o/m", repository)
    monkeypatch.setattr("furlong.config.hub.REPORT_S", 0.01)
    monkeypatch.setattr(hub, "delay_s", 0.03)
    resolve_model("--hf-checkpoint", "o/m")
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "furlong: downloading o/m (main) from the Hub"
    assert second == f"{first}: 0 s so far"


def test_a_revision_and_a_model_without_weights(hub, repository, tmp_path):
    hub.add("models", "o/m", repository)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (other / name).write_text('{"other": 1}')
    tagged = hub.add("models", "o/m", other, "v2")
    assert Path(resolve_model("--hf-checkpoint", "o/m@v2", weights=False)).name == tagged
    with pytest.raises(ConfigError, match=r"o/m@v2: it has no weights in safetensors.*; choose"):
        resolve_model("--hf-checkpoint", "o/m@v2")


def test_splits_become_folders_of_rows(hub, tmp_path):
    commit = add_data(hub, tmp_path / "gsm8k")
    home, name = tmp_path / "home", "openai/gsm8k"
    test, *errors = resolved_data(
        hub,
        home,
        f"{name}:test?config=extra@[1:]",
        "openai/math:train",
        f"{name}:train",
        f"{name}:train?config=mian",
        f"{name}:dev?config=main",
        f"{name}?config=main",
        f"{name}?split=train",
    )
    folder = Path(test.removesuffix("@[1:]"))
    assert (folder.parent.name, folder.name) == (commit, "gsm8k-test")
    assert prompt_file_problem("--prompt-data", test) is None
    for problem, expected in zip(
        errors,
        (
            "openai/math:train: neither a local path nor public on",
            "the data set has the configs main, extra; add ?config=main",
            "the data set has the configs main, extra; add ?config=main",
            "it has no split dev; write openai/gsm8k:SPLIT with one of train, test",
            "it has several splits; write openai/gsm8k:SPLIT with one of train, test",
            "a data set on the Hub has no option split; write OWNER/NAME:SPLIT",
        ),
        strict=True,
    ):
        assert expected in problem
    hub.requests.clear()
    again, train, other = resolved_data(
        hub, home, f"{name}:test?config=extra@[1:]", f"{name}:train?config=extra", "o/data:train", offline=True
    )
    assert again == test
    assert train.endswith("gsm8k-train")  # which datasets has in its cache
    assert "HF_HUB_OFFLINE is set, and the cache" in other
    assert hub.requests == []


def test_what_is_not_there_is_one_error_with_a_remedy(hub, repository, monkeypatch):
    hub.add("models", "o/m", repository)

    def message(text):
        with pytest.raises(ConfigError) as caught:
            resolve_model("--hf-checkpoint", text)
        [problem] = caught.value.problems
        assert problem.startswith(f"--hf-checkpoint {text}: ")
        return problem

    assert "neither a local path nor public" in message("o/other")
    assert "no such revision" in message("o/m@v7")
    hub.gated.add("models/o/m")
    assert "access is restricted; accept its conditions" in message("o/m")
    hub.gated.clear()
    offline(monkeypatch)
    assert "HF_HUB_OFFLINE is set" in (problem := message("o/m"))
    assert "run `hf download o/m`" in problem


def test_an_unreachable_hub_is_told_from_a_wrong_name(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:1 cannot be reached.*check the network and HF_ENDPOINT"):
        resolve_model("--hf-checkpoint", "o/m")


def test_flags_get_local_copies_and_the_commit_is_recorded(hub, tmp_path, repository, monkeypatch):
    commit = hub.add("models", "o/m", repository)
    rows = tmp_path / "gsm8k-train"
    monkeypatch.setattr("furlong.config.hub._data_folder", lambda name, revision: rows / revision / name.split)
    words = "--hf-checkpoint o/m --prompt-data d/s@v1:train?config=main --use-kl-loss --environment"
    words += " e.py:E?prompt_data=d/s:test&n=2 --eval-prompt-data test d/s:test@[:9] --ref-load o/none --num-rollout 1"
    resolved, problems = examine(words.split())
    config = resolved.config
    assert Path(str(config.rollout.hf_checkpoint)).name == commit
    assert config.data.prompt_data == f"{rows}/v1/train"
    assert config.eval.eval_prompt_data == ("test", f"{rows}/main/test@[:9]")
    assert config.session.environment == (f"e.py:E?prompt_data={rows}/main/test&n=2",)
    assert config.track.run_name == "grpo-m"
    recorded = {"model o/m@main": commit, "dataset d/s@v1": "v1", "dataset d/s@main": "main"}
    assert json.loads(resolved.to_json())["hub"] == recorded
    assert command_of(resolved).startswith(f"furlong train --hf-checkpoint=o/m@{commit} ")
    assert "'--prompt-data=d/s@v1:train?config=main'" in command_of(resolved)
    assert [problem.row for problem in problems if problem.startswith("--ref-load")] == ["CKPT01"]


def test_models_of_the_file_of_engines_are_names_too(hub, tmp_path, repository):
    commit = hub.add("models", "o/m", repository)
    file, group = tmp_path / "engines.yaml", "server_groups: [{worker_type: regular, num_gpus: 1}]"
    rows = f"sglang: [{{name: own, model_path: o/m, {group}}}, {{name: judge, model_path: MODEL, {group}}}]"
    for model, found in (("o/m@main, update_weights: false", commit), ("o/none", "")):
        file.write_text(rows.replace("MODEL", model))
        words = f"--engine sglang --hf-checkpoint o/m --sglang-config {file} --num-rollout 1"
        resolved, problems = examine(words.split())
        problems = [problem for problem in problems if problem.startswith("--sglang-config")]
        assert resolved.config.engines.rollout_num_gpus == 2
        if found:
            own, judge = served_models(resolved.config)
            assert (own.path, Path(str(judge.path)).name, problems) == (None, commit, [])
        else:
            assert ["model_path o/none: neither a local path nor public" in problem for problem in problems] == [True]


def test_a_path_that_looks_like_a_name_has_both_fixes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    assert "write models/qwen@main for a model on the Hub" in str(model_problem("--hf-checkpoint", "models/qwen"))
    assert "write models/qwen:SPLIT" in str(prompt_file_problem("--prompt-data", "models/qwen"))
