"""Families that transformers lacks load by their config.json, and saved folders are again of them."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from furlong.models.hf_config import CLASS_NAMES, load_config
from furlong.models.hf_folder import ADDED_FAMILIES
from furlong.models.hf_model import build_model, load_model, save_model, write_config
from furlong.models.stored_tensors import with_untrained
from furlong.models.untrained_tensors import is_untrained
from models_zoo import VOCAB, family_config

KNOWN = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
REMOTE = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}


@pytest.mark.parametrize("family", ADDED_FAMILIES)
def test_it_computes_what_the_known_family_computes_and_never_runs_remote_code(family, tmp_path):
    save_model(build_model(family_config(family), seed=0), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"auto_map": REMOTE}
    path.write_text(json.dumps(config))
    (tmp_path / "modeling_x.py").write_text("raise SystemExit")
    loaded = load_model(tmp_path)
    again = tmp_path / "again"
    write_config(loaded, again, dtype=torch.float32, companions=tmp_path)
    written = json.loads((again / "config.json").read_text())
    assert written["model_type"] == family
    assert written["architectures"] == [CLASS_NAMES[type(loaded.config)]]
    assert written["auto_map"] == REMOTE
    assert (again / "modeling_x.py").is_file()
    path.write_text(json.dumps({**config, "model_type": KNOWN[family]}))
    known, tokens = load_model(tmp_path), torch.arange(7)[None] % VOCAB
    for each in (loaded, known):
        each.set_attn_implementation("eager")
    torch.testing.assert_close(loaded(tokens).logits, known(tokens).logits, rtol=0, atol=1e-6)
    assert pickle.loads(pickle.dumps(loaded.config)).model_type == family


def test_every_added_family_has_a_class():
    assert sorted(config.model_type for config in CLASS_NAMES) == sorted(ADDED_FAMILIES)


@pytest.mark.parametrize(
    ("family", "layer", "other"),
    [
        ("mimo", "model.mtp_layers.0.input_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("glm4_moe", "model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight"),
        ("qwen3", "mtp.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_tensors_of_layers_for_multi_token_prediction_are_copied_bitwise(family, layer, other, tmp_path, caplog):
    config = family_config(family)
    if family == "glm4_moe":
        config.num_nextn_predict_layers = 1
    assert is_untrained(layer, config)
    assert not is_untrained(other, config)
    save_model(build_model(config, seed=0), tmp_path)
    file, kept = tmp_path / "model.safetensors", torch.randn(3, dtype=torch.bfloat16)
    own = load_file(file)
    save_file({**own, layer: kept}, file, {"format": "pt"})
    load_model(tmp_path)
    assert "does not use" not in caplog.text
    written = dict(with_untrained(own.items(), tmp_path, load_config(tmp_path)))
    assert written.keys() == {*own, layer}
    assert torch.equal(written[layer], kept)
    assert torch.equal(dict(with_untrained([(layer, kept + 1)], tmp_path, config))[layer], kept + 1)
