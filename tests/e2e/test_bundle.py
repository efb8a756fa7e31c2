"""A step in one file: trained again with the recorded numbers, and nothing of the user in it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from furlong.cli import main
from furlong.errors import ConfigError, DataError
from furlong.files.sample_file import load_samples
from furlong.tools.run_bundle import read_bundle, unpack, write_bundle
from runs import flags, train, write_model, write_prompts

SECRET = "sk-super-secret-7261"


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory):
    """A run of two steps with dumps and checkpoints; its folder, data and metadata have a name that must not leak."""
    home = tmp_path_factory.mktemp(f"home-of-{SECRET}")
    data = write_prompts(home / "prompts.jsonl", metadata={"token": SECRET, "file": str(home)})
    train(
        flags(
            model, data, home / "run", num_rollout=2, global_batch_size=8, dump_details=home / "dump",
            save=home / "save", save_interval=1, wandb_key=None, freeze_params_name_list=["embed_tokens"],
        )
    )  # fmt: skip
    return home


def test_step_is_trained_again_with_the_recorded_numbers(recorded, model, tmp_path, capsys):
    write_bundle(recorded / "run", 2, tmp_path / "b.zip", with_checkpoint=True)
    words = ["replay", str(tmp_path / "b.zip"), "--hf-checkpoint", str(model), "--rtol", "0"]
    assert main([*words, "--output-dir", str(tmp_path / "out"), "--num-threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_comparable"]
    same = {name for name, row in found["metrics"].items() if row["recorded"] == row["replayed"]}
    assert {"train/loss", "train/grad_norm", "train/ppo_kl", "rollout/raw_reward", "rollout/log_probs"} <= same


def test_other_numbers_are_a_difference(recorded, model, tmp_path, capsys, monkeypatch):
    write_bundle(recorded / "run", 1, tmp_path / "b.zip")
    words = ["replay", str(tmp_path / "b.zip"), "--hf-checkpoint", str(model), "--num-threads", "1"]
    assert main([*words, "--output-dir", str(tmp_path / "a")]) == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "replay").mkdir(parents=True)
    assert main([*words, "--eps-clip", "0.0001"]) == 1
    assert "differs" in capsys.readouterr().out
    assert (tmp_path / "outputs" / "replay-2" / "metrics.jsonl").exists()
    assert main([*words, "--output-dir", str(tmp_path / "a")]) == 2
    assert f"--output-dir {tmp_path / 'a'}" in capsys.readouterr().err


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_no_path_and_no_secret_is_in_a_bundle(recorded, model, tmp_path, with_checkpoint):
    path = tmp_path / "b.zip"
    bundle = write_bundle(recorded / "run", 2, path, with_checkpoint=with_checkpoint)
    forbidden = [SECRET, str(recorded), str(model), recorded.name, "/home", "/tmp", "prompts.jsonl"]
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    for name, content in contents.items():
        for word in forbidden:
            assert word.encode() not in content, (name, word)
            assert word not in name
    assert "freeze_params_name_list" in bundle.flags
    assert not {"hf_checkpoint", "prompt_data", "output_dir", "save"} & bundle.flags.keys()
    words = unpack(path, read_bundle(path), tmp_path)
    (group, *_) = load_samples(tmp_path / "1.safetensors").groups
    assert group.samples[0].tokens
    assert (group.samples[0].response, group.samples[0].metadata, group.samples[0].label) == ("", {}, None)
    assert ("--load" in words) == with_checkpoint


def test_text_is_kept_on_request(recorded, tmp_path):
    write_bundle(recorded / "run", 1, tmp_path / "b.zip", with_text=True)
    unpack(tmp_path / "b.zip", read_bundle(tmp_path / "b.zip"), tmp_path)
    assert load_samples(tmp_path / "0.safetensors").groups[0].samples[0].prompt == "0+0="


def test_command_names_what_it_left_out(recorded, tmp_path, capsys):
    assert main(["bundle", str(recorded / "run"), "--step", "2", "-o", str(tmp_path / "b.zip")]) == 0
    out = capsys.readouterr().out
    assert "without text" in out
    assert "checkpoint" in out
    assert [p.name for p in tmp_path.iterdir()] == ["b.zip"]


def test_incomplete_runs_cannot_be_bundled(recorded, model, tmp_path):
    with pytest.raises(ConfigError, match=r"--step 3: .* steps 1 to 2"):
        write_bundle(recorded / "run", 3, tmp_path / "b.zip")
    with pytest.raises(ConfigError, match=r"--with-checkpoint: .* step 0"):
        write_bundle(recorded / "run", 1, tmp_path / "b.zip", with_checkpoint=True)
    data = write_prompts(tmp_path / "prompts.jsonl", 8)
    train(flags(model, data, tmp_path / "plain", num_rollout=1))
    with pytest.raises(ConfigError, match="--save-debug-rollout-data"):
        write_bundle(tmp_path / "plain", 1, tmp_path / "b.zip")


def test_another_model_and_another_file_are_refused(recorded, tmp_path, capsys):
    write_bundle(recorded / "run", 1, tmp_path / "b.zip")
    other = write_model(tmp_path / "other", width=64)
    assert main(["replay", str(tmp_path / "b.zip"), "--hf-checkpoint", str(other)]) == 2
    assert "hidden_size was 32, is 64" in capsys.readouterr().err
    (tmp_path / "no.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"no\.zip"):
        read_bundle(tmp_path / "no.zip")
    with pytest.raises(DataError, match="/dev/zero"):
        read_bundle(Path("/dev/zero"))
