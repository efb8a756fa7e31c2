"""Weight updates from Megatron trainers to SGLang are bitwise exact in every parallel layout, by CUDA IPC and NCCL."""

from __future__ import annotations

import asyncio
import importlib.util
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from furlong.interfaces import SamplingParams
from furlong.machine import disable_nccl_cumem
from furlong.models.hf_model import build_model, save_model
from ranks_zoo import device_count, ranks_possible, run_cases
from served_sglang import PROMPTS, log_probs_of, served

pytest.importorskip("megatron", reason="megatron-core is not installed")
if not torch.cuda.device_count() or importlib.util.find_spec("sglang") is None:
    pytest.skip("needs a CUDA device and SGLang", allow_module_level=True)

disable_nccl_cumem()

LAYOUTS = {  # name: model, transport, layout
    "one": ("dense", "ipc", {}),
    "tensor": ("dense", "ipc", {"tensor": 2, "sequence_parallel": True}),
    "pipeline": ("dense", "nccl", {"pipeline": 2}),
    "interleaved": ("dense", "ipc", {"pipeline": 2, "virtual": 2}),
    "tensor-pipeline": ("dense", "nccl", {"tensor": 2, "pipeline": 2}),
    "experts": ("experts", "ipc", {"expert": 2}),
    "experts-pipeline": ("experts", "nccl", {"expert": 2, "pipeline": 2, "world": 4}),
}


def write_model(folder, kind: str, seed: int):
    """Write a model wide enough for SGLang's kernels, and a copy with plain attention."""
    common = {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": None,
        "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": kind == "dense",
    }  # fmt: skip
    config: PretrainedConfig = Qwen3Config(**common)
    if kind == "experts":
        config = Qwen3MoeConfig(**common, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2)
    model = build_model(config, seed=seed, dtype=torch.bfloat16)
    save_model(model, folder)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    return plain.to("cuda").eval()


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["dense", "experts"])
def engine(request, runner, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder / "model", request.param, seed=0)
    with served(folder, runner) as engine:
        yield request.param, folder, engine


def sizes_of(args: dict) -> tuple[int, dict]:
    """Return the number of ranks of a layout, and its other arguments."""
    world = args.get("world", args.get("tensor", 1) * args.get("pipeline", 1) * args.get("expert", 1))
    return world, {name: value for name, value in args.items() if name != "world"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_of_every_layout_arrive(engine, runner, name):
    kind, folder, generating = engine
    family, transport, args = LAYOUTS[name]
    world, sizes = sizes_of(args)
    if family != kind:
        pytest.skip(f"another model is served: {kind}")
    if world > ranks_possible():
        pytest.skip(f"{world} ranks are needed, {ranks_possible()} are possible")
    version = list(LAYOUTS).index(name) + 1
    trained = write_model(folder / f"trained-{version}", kind, seed=version)
    server = generating.servers[0]
    case = {
        "name": name, "function": "update_weights", "world": world,
        "first_gpu": device_count() - 1 if transport == "ipc" else 0,  # the server uses the last GPU
        "args": {
            "family": f"trained-{version}", "url": server.url, "transport": transport, "version": version,
            "device": "cuda", **sizes,
        },
    }  # fmt: skip
    found = run_cases("megatron_weight_updates", folder, [case], deadline_s=100)[name][0]
    logging.getLogger(__name__).warning("%s, %d ranks by %s: %s", name, world, transport, found)
    assert found["verification"] == "every checksum verified"
    assert runner.run(server.served_version()) == str(version)
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    gaps = []
    for prompt in PROMPTS:
        done = runner.run(generating.generate(prompt, params))
        gaps.append((torch.tensor(done.log_probs) - log_probs_of(trained, prompt, done.tokens)).abs())
    assert float(torch.cat(gaps).mean()) < 0.02
