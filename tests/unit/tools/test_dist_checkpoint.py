"""`furlong check` of Megatron-LM checkpoints reports what is missing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from furlong.commands.weight_folders import check, convert
from furlong.errors import CheckpointError, ConfigError
from furlong.tools.dist_checkpoint import check_dist, dist_folder
from furlong.training.megatron_lm.dist_files import COMMON, INDEX, VERSION, DistReader, DistWriter

TRACKER = "latest_checkpointed_iteration.txt"
LAYER = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "self_attention.linear_qkv.weight")


def write(folder, *, without=(), values=1.0, stacked=False, noted=7, optimizer=False, part=4, more=(), objects=0):
    """A checkpoint of three layers, in files of a few tensors each."""
    folder.mkdir(parents=True)
    writer = DistWriter(folder, max_bytes=600)
    tensors = [f"decoder.layers.{layer}.{name}" for layer in range(3) for name in LAYER]
    if stacked:
        tensors = [f"decoder.layers.{name}" for name in LAYER]
    for name in (*tensors, *(f"optimizer.state.exp_avg.{name}" for name in tensors if optimizer)):
        if name in without:
            continue
        shape = (3, 4, 5) if stacked else (4, 5)
        whole = torch.full(shape, 0.0 if "optimizer" in name else values)
        writer.add(name, whole[:part], offset=(0,) * whole.ndim, shape=shape)
    for name, whole in more:
        writer.add(name, whole, offset=(0,) * whole.ndim, shape=whole.shape)
    for number in range(objects):
        writer.add_empty_object(f"decoder.layers.{number}.mlp._extra_state/shard_0_1")
    writer.close({"iteration": noted, "args": {"num_layers": 3}})
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "save" / "iter_0000007", optimizer=True)


def diagnose(folder, **options):
    return [(found.id, found.finding) for found in check_dist(folder, **options)]


def test_a_complete_checkpoint_is_healthy_and_found_from_its_parent_folder(folder, capsys):
    (folder.parent / TRACKER).write_text("7\n")
    assert dist_folder(folder.parent) == dist_folder(folder) == folder
    assert check([str(folder.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    DistReader(folder).check()


def test_files_that_are_missing_or_cut_off_are_named(folder):
    names = sorted(path.name for path in folder.glob("*.distcp"))
    assert len(names) > 2
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:-7])
    (first_id, first), (second_id, second) = diagnose(folder)
    assert first_id == second_id == "CKPT04"
    assert names[0] in first
    assert names[1] in second
    assert str((folder / names[1]).stat().st_size) in second
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*__0_1\.distcp"):
        DistReader(folder).check()


def test_an_object_that_is_cut_off_is_reported(tmp_path):
    folder = write(tmp_path / "iter_0000007", objects=1)
    last = sorted(folder.glob("*.distcp"))[-1]
    last.write_bytes(last.read_bytes()[:-7])
    assert [last.name in text for _, text in diagnose(folder)] == [True]


def test_a_save_that_was_cut_off_is_reported(folder):
    (folder / VERSION).unlink()
    assert [(what, VERSION in text) for what, text in diagnose(folder)] == [("CKPT04", True)]
    (folder / INDEX).unlink()
    assert [(what, INDEX in text) for what, text in diagnose(folder)] == [("CKPT01", True)]


def test_a_tracker_that_names_nothing_lists_what_there_is(folder, capsys):
    (folder.parent / TRACKER).write_text("9\n")
    assert check([str(folder.parent)]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "[CKPT01]" in output
    assert output.index("iter_0000009") < output.index("iter_0000007")


def test_layers_and_values_are_checked(tmp_path):
    gone = write(tmp_path / "b", without=[f"decoder.layers.2.{name}" for name in LAYER])
    assert ["layers 2 of 3" in text for _, text in diagnose(gone)] == [True]
    zero = write(tmp_path / "c", values=0.0)
    [found] = check_dist(zero)
    assert (found.severity, found.evidence["num_tensors"]) == ("warning", 9)
    assert found.evidence["tensors"][0] == "decoder.layers.0.mlp.linear_fc1.weight"
    broken = write(tmp_path / "d", values=float("nan"))
    [found] = check_dist(broken)
    assert (found.severity, found.evidence["num_tensors"]) == ("error", 9)
    short = write(tmp_path / "e", part=3)
    assert all("15 of 20 values" in text for _, text in diagnose(short))
    assert len(diagnose(short)) == 9
    assert diagnose(write(tmp_path / "f", stacked=True)) == []


def test_zero_biases_and_padding_between_parameters_of_a_buffer_are_healthy(tmp_path):
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    more = [
        ("decoder.layers.self_attention.linear_qkv.bias", torch.zeros(3, 8)),
        (f"{bucket}.exp_avg", torch.tensor([1.0, float("nan")])),
    ]
    assert diagnose(write(tmp_path / "a", stacked=True, more=more)) == []


def test_convert_check_is_check(folder, capsys):
    assert convert(["check", str(folder)]) == 0
    said_by_convert = capsys.readouterr().out
    assert check([str(folder)]) == 0
    assert capsys.readouterr().out == said_by_convert


def test_a_folder_that_was_renamed_is_reported(folder):
    other = folder.with_name("iter_0000008")
    shutil.copytree(folder, other)
    ((id, text),) = diagnose(other)
    assert id == "CKPT04"
    assert all(value in text for value in ("iteration 8", "common.pt", "7"))
    (folder / COMMON).write_bytes(b"PK")
    ((id, text),) = diagnose(folder)
    assert str(folder / COMMON) in text


def test_a_model_to_compare_with_needs_such_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="--hf-checkpoint has no effect"):
        check([str(tmp_path), "--hf-checkpoint", str(tmp_path)])
