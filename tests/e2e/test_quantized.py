"""Runs whose engine has quantized weights, with a trainer in float32: they learn, sync and resume like others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from calibrated_folders import write_calibrated
from furlong.cli import main
from furlong.cluster.ray_session import open_session
from furlong.diagnosis.self_test import LOOK_CLOSER
from furlong.errors import ConfigError
from furlong.files.sample_file import load_samples
from furlong.models.hf_model import load_model
from furlong.models.quantized_folder import is_quantized
from furlong.quantization.fp8 import Fp8Blocks
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.weight_format import WeightFormat
from furlong.tools.quantize_folder import quantize_folder
from runs import flags, is_finite, rows, train, write_model, write_prompts

FORMS: dict[str, WeightFormat] = {"fp8": Fp8Blocks((16, 16)), "int4": Int4Groups(16)}


@pytest.fixture(params=FORMS)
def folders(request, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return the model, its quantized copy and prompts."""
    model = write_model(tmp_path / "model")
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    quantize_folder(model, quantized, FORMS[request.param])
    return model, quantized, write_prompts(tmp_path / "prompts.jsonl")


def test_a_quantized_engine_trains_with_the_weights_of_ref_load(folders, tmp_path):
    model, quantized, data = folders
    out, hf = tmp_path / "run", tmp_path / "hf-2"
    changes = {
        "ref_load": model,
        "save": tmp_path / "save",
        "save_hf": tmp_path / "hf-{rollout_id}",
        "check_weight_update_equal": True,
    }
    assert train(flags(quantized, data, out, **changes)) == 2
    assert all(map(is_finite, rows(out)))
    error = rows(out)[0]["train/train_rollout_logprob_abs_diff"]
    assert 1e-6 < error < 0.5  # of quantization; without it, both compute the same in float32
    if error > LOOK_CLOSER:
        assert rows(out)[0]["selftest/share/quantization"] > 0.95
    assert not is_quantized(hf)
    before, after = (dict(load_model(each).named_parameters()) for each in (model, hf))
    assert any((before[name] != tensor).any() for name, tensor in after.items())
    again = flags(quantized, data, tmp_path / "again", ref_load=model, load=tmp_path / "save", num_rollout=3)
    assert train(again) == 3


def test_dequantize_trains_from_the_quantized_values(folders, tmp_path):
    _, quantized, data = folders
    with pytest.raises(ConfigError, match=r"(?s)weights are quantized.*--ref-load.*--dequantize"):
        train(flags(quantized, data, tmp_path / "refused"))
    assert train(flags(quantized, data, tmp_path / "run", dequantize=True, use_kl_loss=True, kl_loss_coef=0.1)) == 2
    first = rows(tmp_path / "run")[0]
    assert first["train/train_rollout_logprob_abs_diff"] < 0.5


@pytest.mark.nightly
@pytest.mark.parametrize(
    "transport",
    [
        {"update_weight_transport": "ipc", "colocate": True},
        {"update_weight_transport": "nccl"},
        {"update_weight_transport": "disk"},
        {"update_weight_transport": "disk", "update_weight_mode": "delta"},
    ],
    ids=lambda flags: "-".join(map(str, flags.values())),
)
def test_an_engine_server_gets_quantized_tensors_by_every_transport(folders, engines, tmp_path, transport, caplog):
    model, quantized, data = folders
    out = tmp_path / "run"
    with caplog.at_level("DEBUG"):
        served = {"engine": "embedded", "rollout_num_gpus": 1, "ref_load": model, "log_level": "DEBUG"} | transport
        assert train(flags(quantized, data, out, **served)) == 2
    assert all(map(is_finite, rows(out)))
    assert rows(out)[1]["train/train_rollout_logprob_abs_diff"] > 1e-6
    assert caplog.text.count("every checksum verified") >= 2


@pytest.fixture
def int4(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a model whose columns two ranks can share, its copy in INT4, and prompts."""
    model = write_model(tmp_path / "model", num_key_value_heads=2)
    (tmp_path / "int4").mkdir()
    quantize_folder(model, tmp_path / "int4", Int4Groups(8))
    return model, tmp_path / "int4", write_prompts(tmp_path / "prompts.jsonl")


def test_quantization_aware_training_computes_what_the_int4_engine_does(int4, tmp_path, monkeypatch):
    model, quantized, data = int4
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "8")
    changes = {"ref_load": model, "use_kl_loss": True, "kl_loss_coef": 0.1}
    assert train(flags(quantized, data, tmp_path / "run", check_weight_update_equal=True, **changes)) == 2
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-6 for row in rows(tmp_path / "run"))
    assert abs(rows(tmp_path / "run")[0]["train/kl_loss"]) < 1e-9  # the reference is rounded as well
    monkeypatch.delenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG")
    assert train(flags(quantized, data, tmp_path / "without", **changes)) == 2
    assert all(row["train/train_rollout_logprob_abs_diff"] > 1e-4 for row in rows(tmp_path / "without"))


@pytest.mark.nightly
def test_ranks_that_share_the_weights_round_them_alike(int4, ray_workers, tmp_path):
    model, quantized, data = int4
    layouts = {
        "fsdp": {},
        "megatron": {"train_backend": "megatron", "tensor_model_parallel_size": 2, "sequence_parallel": True},
    }
    session = open_session("local", num_slots=3)
    try:
        for name, layout in layouts.items():
            changes = {"ref_load": model, "int4_qat": True, "check_weight_update_equal": True, **layout}
            ranks = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1, "engine": "embedded"}
            assert train(flags(quantized, data, tmp_path / name, **ranks, **changes)) == 2
            assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-6 for row in rows(tmp_path / name))
    finally:
        session.close()


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_awq_and_gptq_folders_are_read_by_engines_and_converted_for_training(tmp_path, method):
    model, data = write_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    whole = write_calibrated(model, tmp_path / method, method)
    assert main(["convert", "dequantize", str(tmp_path / method), str(tmp_path / "whole")]) == 0
    [path] = (tmp_path / "whole").glob("*.safetensors")
    written = load_file(path)
    assert written.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in written.items())
    responses = {}
    for name in (method, "whole"):
        out = tmp_path / f"run-{name}"
        dump = tmp_path / f"{name}-{{rollout_id}}"
        assert train(flags(tmp_path / name, data, out, debug_rollout_only=True, save_debug_rollout_data=dump)) == 2
        samples = [sample for group in load_samples(tmp_path / f"{name}-1").groups for sample in group]
        responses[name] = [(sample.tokens, sample.rollout_log_probs) for sample in samples]
    assert responses[method] == responses["whole"]
    trained = flags(tmp_path / method, data, tmp_path / "refused", ref_load=model)
    with pytest.raises(ConfigError, match=rf"(?s){method.upper()} with 4 bits.*calibration.*hf-to-int4"):
        train(trained)
    assert train(flags(model, data, tmp_path / "trained", load=tmp_path / method, dequantize=True)) == 2
    assert rows(tmp_path / "trained")[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
