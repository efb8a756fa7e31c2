"""`furlong check`: values of stored weights, model folders and trainer checkpoints."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from furlong.cli import main
from furlong.errors import CheckpointError, ConfigError
from furlong.files.checkpoint_folder import TRACKER, find_checkpoint, folder_name
from furlong.files.manifest import MANIFEST, write_manifest
from furlong.files.tensor_file import read_header
from furlong.tools import weight_values as weights
from furlong.tools.dist_checkpoint import dist_folder
from furlong.tools.weight_values import bad_values, check_weights

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


def test_values_that_are_not_finite_are_counted_in_every_format(tmp_path, monkeypatch):
    values = torch.linspace(-3, 3, 20)
    bad = values.clone()
    bad[[3, 17]] = math.nan
    for chunk, dtype in itertools.product((8, 1 << 24), DTYPES):
        monkeypatch.setattr(weights, "CHUNK_VALUES", chunk)
        largest = torch.full((4,), torch.finfo(dtype).max, dtype=torch.float64)
        tensors = {"bad": bad.to(dtype), "good": values.to(dtype), "largest": largest.to(dtype)}
        if dtype is not torch.float8_e4m3fn:  # which has no infinity
            tensors["inf"] = torch.tensor([1.0, -math.inf]).to(dtype)
        save_file(tensors, tmp_path / "x.safetensors")
        found = {b.tensor: b.num_not_finite for b in bad_values(read_header(tmp_path / "x.safetensors"))}
        assert found == {"bad": 2} | ({"inf": 1} if "inf" in tensors else {})


def test_matrices_of_zeros_are_found_and_vectors_are_not(tmp_path):
    tensors = {"w": torch.zeros(2, 3), "minus": -torch.zeros(2, 3), "bias": torch.zeros(3), "one": torch.eye(2)}
    tensors["ids"] = torch.zeros(2, 2, dtype=torch.int64)
    save_file(tensors, tmp_path / "x.safetensors")
    assert {b.tensor for b in bad_values(read_header(tmp_path / "x.safetensors"))} == {"w", "minus"}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "num_hidden_layers": 2}))
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(2, 2) for i in range(2)}
    save_file(tensors | {"lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    return tmp_path


def test_valid_weights_have_no_problem(model):
    assert check_weights(model) == []


def test_nan_and_zeros_are_found_by_values_but_not_by_headers(model, capsys):
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.full((2, 2), math.nan)}
    tensors |= {"model.layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}
    save_file(tensors, model / "model.safetensors")
    nan, zero = check_weights(model)
    assert (nan.id, nan.severity, zero.severity) == ("CKPT04", "error", "warning")
    assert "model.layers.0.mlp.up_proj.weight (4 of 4 values)" in nan.finding
    assert zero.evidence["tensors"] == ["model.layers.1.mlp.up_proj.weight"]
    assert main(["check", str(model), "--json"]) == 1
    assert [f["id"] for f in json.loads(capsys.readouterr().out)["findings"]] == ["CKPT04", "CKPT04"]
    assert check_weights(model, with_values=False) == []


def test_file_that_is_cut_off_is_a_finding_and_is_not_read_for_values(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    (finding,) = check_weights(model)
    assert finding.id == "CKPT04"
    assert f"cannot read {path}" in finding.finding
    assert "cut off" in finding.finding


def test_an_invalid_index_is_reported(model, capsys):
    for text in ("", "[]"):
        (model / "model.safetensors.index.json").write_text(text)
        assert main(["check", str(model)]) == 1
        assert "[CKPT04]" in capsys.readouterr().out


def test_files_that_a_model_folder_lacks_are_found(model):
    config = (model / "config.json").read_text()
    (model / "config.json").unlink()
    (finding,) = check_weights(model)
    assert (finding.severity, "config.json" in finding.finding) == ("error", True)
    (model / "config.json").write_text(config)
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    (finding,) = check_weights(model)
    assert "1 safetensors files" in finding.finding
    assert "model.safetensors.index.json" in finding.remedy
    (model / "model-00001-of-00002.safetensors").unlink()
    (finding,) = check_weights(model)
    assert (finding.id, finding.severity) == ("CKPT04", "error")
    assert finding.evidence["held"] == ["config.json"]


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "save" / folder_name(3)
    (folder / "trainer").mkdir(parents=True)
    save_file({"w": torch.ones(2, 2)}, folder / "trainer" / "trainer_model.safetensors")
    save_file({"w/exp_avg": torch.zeros(2, 2)}, folder / "trainer" / "trainer_optimizer.safetensors")
    write_manifest(folder, 3)
    (tmp_path / "save" / TRACKER).write_text("3\n")
    return tmp_path / "save"


def test_a_valid_trainer_checkpoint_has_no_problem(saved):
    assert check_weights(saved) == []  # moments may be zero
    assert check_weights(saved / folder_name(3)) == []


def test_trainer_checkpoint_is_refused_with_the_message_of_load(saved):
    (saved / folder_name(3) / "trainer" / "trainer_model.safetensors").write_bytes(b"")
    (finding,) = check_weights(saved)
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(saved, step=None, save_dir=None)
    assert finding.id == "CKPT01"
    assert finding.finding == str(caught.value)
    (saved / folder_name(3) / MANIFEST).unlink()
    (unfinished,) = check_weights(saved / folder_name(3))
    assert (unfinished.id, MANIFEST in unfinished.finding) == ("CKPT01", True)


@pytest.mark.parametrize("content", [None, b"\xff\x00"])
def test_the_newest_checkpoint_is_checked_without_a_usable_tracker(saved, content):
    (saved / TRACKER).unlink()
    if content is not None:
        (saved / TRACKER).write_bytes(content)
    (finding,) = check_weights(saved)
    assert (finding.id, finding.severity) == ("CKPT01", "warning")
    assert all(str(path) in finding.finding for path in (saved / TRACKER, saved / folder_name(3)))
    assert dist_folder(saved) is None
    (saved / folder_name(3) / MANIFEST).unlink()
    if content is not None:
        with pytest.raises(CheckpointError, match=str(saved / TRACKER)):
            find_checkpoint(saved, step=None, save_dir=saved)


def test_a_changed_byte_of_a_trainer_checkpoint_is_found_with_its_file(saved):
    path = saved / folder_name(3) / "trainer" / "trainer_optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (finding,) = check_weights(saved)
    assert (finding.id, str(path) in finding.finding) == ("CKPT01", True)


def test_trainer_weights_that_are_not_finite_are_found(saved):
    save_file({"w": torch.full((2, 2), math.inf)}, saved / folder_name(3) / "trainer" / "trainer_model.safetensors")
    write_manifest(saved / folder_name(3), 3)
    (finding,) = check_weights(saved)
    assert finding.evidence["tensors"] == ["w (4 of 4 values)"]


def test_other_folders_are_wrong_usage(tmp_path, capsys):
    with pytest.raises(ConfigError, match="none"):
        check_weights(tmp_path / "none")
    (tmp_path / "notes.txt").touch()
    assert main(["check", str(tmp_path)]) == 2
    assert "notes.txt" in capsys.readouterr().err
