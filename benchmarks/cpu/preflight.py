"""Measure the run time of `furlong doctor FLAGS` on a model folder with many shards.

    python benchmarks/cpu/preflight.py [--shards 100] [--rounds 5]

The folder imitates a large mixture-of-experts model: 48 layers of 128 experts, 18,771 tensors in 100 sparse shard files
of 610 MB (which use almost no disk space), an index, and a tokenizer with 150,000 entries. The data has 20,000 rows.
The doctor reads the config, the tokenizer, the index and the header of every shard, renders and counts prompts, tests
the verifier and inspects the machine. Goal: below 2 s.

The baselines alternate with it in separate processes. `transformers` loads config and tokenizer (AutoConfig,
AutoTokenizer); `safetensors` opens every shard and lists its tensors. Both do less work than the doctor. CPU seconds
include child processes. One untimed round fills the disk cache first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYERS, EXPERTS, HIDDEN, EXPERT_WIDTH, VOCAB = 48, 128, 2048, 768, 150_000

TRANSFORMERS = """
import sys
from transformers import AutoConfig, AutoTokenizer
AutoConfig.from_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(sys.argv[1])
"""
SAFETENSORS = """
import sys
from pathlib import Path
from safetensors import safe_open
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(path, "np") as opened:
        assert list(opened.keys())
"""


def tensors() -> Iterator[tuple[str, list[int]]]:
    """Yield tensor names and shapes, layer by layer."""
    yield "model.embed_tokens.weight", [VOCAB, HIDDEN]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", [HIDDEN]
        yield f"{prefix}.post_attention_layernorm.weight", [HIDDEN]
        for name, rows in (("q_proj", 4096), ("k_proj", 512), ("v_proj", 512)):
            yield f"{prefix}.self_attn.{name}.weight", [rows, HIDDEN]
        yield f"{prefix}.self_attn.o_proj.weight", [HIDDEN, 4096]
        yield f"{prefix}.mlp.gate.weight", [EXPERTS, HIDDEN]
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = [HIDDEN, EXPERT_WIDTH] if name == "down_proj" else [EXPERT_WIDTH, HIDDEN]
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", shape
    yield "model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [VOCAB, HIDDEN]


def write_model(folder: Path, num_shards: int) -> int:
    """Write the model folder. Return the number of tensors."""
    folder.mkdir()
    every = list(tensors())
    size = -(-len(every) // num_shards)
    weight_map: dict[str, str] = {}
    for number, start in enumerate(range(0, len(every), size), 1):
        name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor, shape in every[start : start + size]:
            length = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + length]}
            end += length
            weight_map[tensor] = name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": EXPERT_WIDTH, "num_experts": EXPERTS,
        "num_experts_per_tok": 8, "vocab_size": VOCAB, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "eos_token_id": 0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    write_tokenizer(folder)
    return len(every)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-pair tokenizer with all single bytes, all byte pairs, and some triples."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.product(letters, letters))
    triples = ((a + b, c) for (a, b), c in itertools.product(pairs, letters[:2]))
    merges = [*pairs, *triples][: VOCAB - len(letters) - 1]
    vocab = {word: i for i, word in enumerate(["<|end|>", *letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def timed(command: list[str]) -> tuple[float, float]:
    """Run a command. Return the wall and CPU seconds of the process and its children."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command[:6]} exited with code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Write the folder, time all commands in turn, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        count = write_model(folder / "model", args.shards)
        rows = (json.dumps({"prompt": f"What is {i} + {i}?", "label": str(2 * i)}) for i in range(20_000))
        (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
        size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        print(f"{count:,} tensors in {args.shards} shards, {size / 1e9:.0f} GB")
        doctor = [
            sys.executable, "-m", "furlong", "doctor", "--hf-checkpoint", str(folder / "model"), "--prompt-data",
            str(folder / "data.jsonl"), "--input-key", "prompt", "--label-key", "label", "--rm-type", "math",
            "--num-rollout", "100", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8",
            "--rollout-max-response-len", "4096",
        ]  # fmt: skip
        ways = {
            "furlong doctor": doctor,
            "transformers": [sys.executable, "-c", TRANSFORMERS, str(folder / "model")],
            "safetensors": [sys.executable, "-c", SAFETENSORS, str(folder / "model")],
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(args.rounds + 1):
            for name, command in ways.items():
                seconds = timed(command)
                if number:
                    found[name].append(seconds)
        base = statistics.median(wall for wall, _ in found["furlong doctor"])
        for name, seconds in found.items():
            wall, cpu = (statistics.median(values) for values in zip(*seconds, strict=True))
            print(f"{name:16} {wall:6.2f} s  CPU {cpu:6.2f} s  {wall / base:5.2f} x furlong")


if __name__ == "__main__":
    main()
