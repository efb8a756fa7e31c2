"""Conversion with calibration, on a text and on samples of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from furlong.cli import main
from furlong.models.hf_config import load_config
from furlong.models.hf_model import load_model, load_network
from furlong.models.quantized_folder import folder_scheme
from furlong.models.tokenizer import load_tokenizer
from furlong.quickstart.quickstart import model_folder
from furlong.tools import calibration
from furlong.tools.model_folder import check_model

SUMS = " ".join(f"{a} + {b} = {a + b}" for a in range(40) for b in range(1, 40, 3))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MIN_WINDOWS", 4)
    monkeypatch.setattr(calibration, "WINDOW", 128)
    for name, value in {"NUM_FROM_ANY": 8, "NUM_FROM_BEGIN": 4, "LENGTH": 128}.items():
        monkeypatch.setattr(calibration, name, value)


def distance(folder: Path) -> float:
    """KL divergence of the model's tokens from those of a quantized folder."""
    ids = torch.tensor([load_tokenizer(model_folder()).encode(SUMS)[:128]])
    log_probs = []
    for each in (model_folder(), folder):
        model = load_model(each)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            log_probs.append(model(ids).logits.log_softmax(-1))
    whole, quantized = log_probs
    return float((whole.exp() * (whole - quantized)).sum(-1).mean())


@pytest.mark.parametrize(
    ("command", "has_text", "least"),
    [("hf-to-int4", True, 4), ("hf-to-fp8", True, 4), ("hf-to-int4", False, 2)],
)
@pytest.mark.nightly
def test_calibrated_weights_change_the_model_less_in_the_same_format(
    tmp_path: Path, capsys, command: str, has_text: bool, least: int
) -> None:
    (tmp_path / "sums.txt").write_text(SUMS)
    text = [str(tmp_path / "sums.txt")] if has_text else []
    words = ["convert", command, str(model_folder())]
    assert main([*words, str(tmp_path / "rounded")]) == 0
    assert main([*words, str(tmp_path / "calibrated"), "--calibrate", *text]) == 0
    rounded, calibrated = folder_scheme(tmp_path / "rounded"), folder_scheme(tmp_path / "calibrated")
    assert rounded == calibrated
    assert calibrated is not None
    assert f"({len(calibrated.names)} calibrated)" in capsys.readouterr().out
    assert check_model(tmp_path / "calibrated") == []
    assert distance(tmp_path / "calibrated") < distance(tmp_path / "rounded") / least


@pytest.mark.parametrize(
    ("content", "reason"), [(b"1 + 1", "at least 512"), (b"\xff\xfe\xfa", "UTF-8"), (None, "cannot be read")]
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, capsys, content: bytes | None, reason: str) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    words = ["convert", "hf-to-int4", str(model_folder()), str(tmp_path / "target"), "--calibrate", str(text)]
    assert main(words) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


@pytest.mark.nightly
def test_samples_of_a_model_are_the_same_each_time() -> None:
    first = calibration.own_samples(model_folder())
    assert first.shape == (12, 128)
    assert first.equal(calibration.own_samples(model_folder()))


def test_a_folder_in_the_place_of_the_text_is_explained(tmp_path: Path, capsys) -> None:
    assert main(["convert", "hf-to-int4", "--calibrate", str(model_folder()), str(tmp_path / "target")]) == 2
    assert "after SOURCE and TARGET" in capsys.readouterr().err


def test_tuned_scales_bring_a_model_closer_to_its_unquantized_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BATCH_TOKENS", 64)
    folder = model_folder()
    model = load_network(folder, load_config(folder), dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor(load_tokenizer(folder).encode(SUMS)[: 40 * 64]).view(40, 64)
    with torch.no_grad():
        targets = [model.base_model(input_ids=each[None], use_cache=False).last_hidden_state[0] for each in ids]
        linears = [each for each in model.base_model.modules() if isinstance(each, nn.Linear)]
        for each in linears:
            each.weight.mul_(1.04)

    def divergence() -> float:
        with torch.no_grad():
            return float(calibration._divergence(model, ids[0], targets[0]))

    before = divergence()
    scales = {each: torch.ones(each.out_features, each.in_features // 32, dtype=torch.bfloat16) for each in linears}
    tuned = calibration.tuned_scales(model, scales, ids, targets)
    assert divergence() < before / 2
    assert all(tuned[each].dtype == torch.bfloat16 and tuned[each].shape == scales[each].shape for each in linears)
    assert sum(float(scale.float().mean()) for scale in tuned.values()) / len(tuned) < 1
