"""Weight updates of quantized models in SGLang's own classes: FP8 and INT4, linear layers and experts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

import forked_sglang
from furlong.models.hf_model import build_model, save_model
from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled
from furlong.quantization.int4 import Int4Groups
from furlong.tools.quantize_folder import quantize_folder
from runs import REPOSITORY
from sglang_on_cpu import SITE, STAND_INS, skip_without_it

pytestmark = pytest.mark.nightly

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128}  # fmt: skip
CONFIGS = {
    "dense": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2),
}
CLASSES = {"dense": "qwen3,Qwen3ForCausalLM", "moe": "qwen3_moe,Qwen3MoeForCausalLM"}
FORMS = {"int4": Int4Groups(32), "fp8": Fp8Blocks((128, 128)), "fp8-channel": Fp8Scaled("channel", torch.bfloat16)}
CASES = [("dense", "int4"), ("moe", "int4"), ("dense", "fp8"), ("moe", "fp8"), ("dense", "fp8-channel")]


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Return by case what `reload_model.py` found."""
    skip_without_it()
    root = tmp_path_factory.mktemp("models")
    for family, config in CONFIGS.items():
        for number in (0, 1):
            source = root / f"{family}{number}"
            save_model(build_model(config, seed=number, dtype=torch.bfloat16), source)
            for form in {form for each, form in CASES if each == family}:
                target = root / f"{family}{number}-{form}"
                target.mkdir()
                quantize_folder(source, target, FORMS[form])
    words = [f"{root}/{family}0-{form},{root}/{family}1-{form},{CLASSES[family]}" for family, form in CASES]
    path = os.pathsep.join(map(str, [STAND_INS, SITE, REPOSITORY / "src"]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [forked_sglang.python(env), Path(__file__).with_name("reload_model.py"), *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {case: json.loads((root / f"{case[0]}1-{case[1]}" / "reloaded.json").read_text()) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_an_update_gives_what_a_new_server_has_in_the_same_memory(case, reloaded):
    found = reloaded[case]
    assert len(found["before"]) > 10
    assert found["differ"] == found["moved"] == []
    assert found["locks"] == 0
    assert found["repeated"] == found["after_a_failure"] == {"differ": [], "moved": []}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_weights_that_sglang_does_not_load_or_loads_wrongly_are_noticed(case, reloaded):
    found = reloaded[case]
    assert "quantized parameters were not loaded: model.layers.1.self_attn.qkv_proj.weight" in found["without_a_layer"]
    assert "quantized parameters differ from what was sent" in found["loaded_wrongly"]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_loader_compares_unquantized_tensors_by_checksum(case, reloaded):
    fine, wrong = reloaded[case]["checked"]
    assert fine == ""
    assert wrong == "1 tensors differ from what was sent: model.layers.1.input_layernorm.weight"
