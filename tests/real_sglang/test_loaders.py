"""The layout of each supported family is what SGLang's own model has after loading, parameter by parameter.

SGLang's own loader reads the folders, as furlong writes them: with a manifest, which it ignores.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import forked_sglang
from furlong.core.weights import UNSHARDED
from furlong.models.hf_model import build_model, save_model
from furlong.sglang_layout.layout_checksums import DENSE, WITH_EXPERTS, LayoutChecksums, expected
from models_zoo import family_config
from runs import REPOSITORY
from sglang_on_cpu import SITE, STAND_INS, skip_without_it

pytestmark = pytest.mark.nightly

LOADERS = {  # family: SGLang's module and class, and the family whose config its environment knows
    "glm4": ("glm4", "Glm4ForCausalLM", "glm4"),
    "llama": ("llama", "LlamaForCausalLM", "llama"),
    "mimo": ("mimo", "MiMoForCausalLM", "qwen2"),
    "mistral": ("mistral", "MistralForCausalLM", "mistral"),
    "mixtral": ("mixtral", "MixtralForCausalLM", "mixtral"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe"),
}


def test_every_family_with_a_layout_is_loaded_here():
    assert LOADERS.keys() == DENSE | WITH_EXPERTS


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return by family the folder of a tiny model and the checksums of SGLang's parameters after it was loaded."""
    skip_without_it()
    root, words = tmp_path_factory.mktemp("models"), []
    for family, (module, name, known) in LOADERS.items():
        model = build_model(family_config(known), seed=0)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        save_model(model, root / family)
        words.append(f"{root / family},{module},{name}")
    path = os.pathsep.join(map(str, [STAND_INS, SITE, REPOSITORY / "src"]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [forked_sglang.python(env), Path(__file__).with_name("load_model.py"), *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {family: (root / family, json.loads((root / family / "loaded.json").read_text())) for family in LOADERS}


@pytest.mark.parametrize("family", LOADERS)
def test_sglang_has_the_tensors_that_are_expected_of_it(family, loaded):
    folder, stored = loaded[family]
    sums = LayoutChecksums(frozenset({torch.bfloat16}))
    for name, tensor in load_file(folder / "model.safetensors").items():
        sums.add(name, tensor)
    right = sums.digests()
    assert not sums.wrong()
    assert not sums.unhashed()
    assert expected(right, stored, UNSHARDED) == stored
