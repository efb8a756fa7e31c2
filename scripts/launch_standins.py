"""Small stand-ins of the files that a launch command names: models, prompt files, evaluation sets.

A model folder has a config.json with the sizes of the published model (`published_models.json`) and, for other models,
those of the command's architecture flags. It has weights of the real shapes in sparse files, and the tokenizer of the
quickstart. Prompt files have the
rows of one rollout, with the columns that the command reads.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from furlong.commands.weight_folders import ALL_BUT_EXPERTS
from furlong.errors import ConfigError
from furlong.models.hf_model import build_empty, named_tensors, shapes_on_disk
from furlong.models.untrained_tensors import WITH_VISION, stored_name
from furlong.quantization.ignore_list import NEVER_QUANTIZED, is_ignored, module_of
from furlong.quantization.scheme import format_of, quantization_settings
from furlong.quickstart.quickstart import model_folder

# Fields that a copy of the model's config.json elsewhere confirms: in aiconfigurator-core 0.12, litgpt 0.5.13, defaults
# of transformers, or public repositories. Others are left out and come from the flags of the script.
PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_models.json").read_text())
SUFFIX = re.compile(r"-(instruct|fp8|int4|bf16)$", re.IGNORECASE)  # of variants with the same sizes
Flags = Mapping[str, Sequence[str]]  # flag -> its words

# What a published folder's name says about its config.json: pattern, model_type, and fields that no flag determines.
_QWEN35 = {"layer_types": "linear"}
FAMILIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (r"qwen2\.5|deepseek-r1-distill-qwen", "qwen2", {}),
    (r"qwen3-next", "qwen3_next", _QWEN35),
    (r"qwen3\.\d.*-a\d+b", "qwen3_5_moe", _QWEN35),
    (r"qwen3\.\d", "qwen3_5", _QWEN35),
    (r"qwen3.*-a\d+b", "qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    (r"qwen3", "qwen3", {}),
    (r"glm-(z1|4)-", "glm4", {"attention_bias": True}),
    (r"glm-4\.7-flash", "glm4_moe_lite", {"n_group": 1, "topk_group": 1, "attention_bias": False}),
    (r"glm-4\.\d", "glm4_moe", {"n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True}),
    (r"glm-5", "glm_moe_dsa", {"n_group": 1, "topk_group": 1, "attention_bias": False, "index_topk": 2048}),
    (r"kimi-k2", "kimi_k2", {"attention_bias": False}),
    (r"moonlight|deepseek-(r1|v3)", "deepseek_v3", {"attention_bias": False}),
    (r"mimo-7b", "mimo", {"attention_bias": True, "num_nextn_predict_layers": 1}),
    (r"minimax-m2", "minimax_m2", {"use_qk_norm": True, "scoring_func": "sigmoid"}),
    (r"llama-?3", "llama", {}),
    (r"gpt-oss", "gpt_oss", {"attention_bias": True}),
)
QUANTIZED: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"fp8", {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}),
    (
        r"int4|kimi-k2-thinking/?$",
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
                }
            },
            "ignore": list(ALL_BUT_EXPERTS),
        },
    ),
)
STORED = {
    torch.float8_e4m3fn: ("F8_E4M3", 1),
    torch.bfloat16: ("BF16", 2),
    torch.float32: ("F32", 4),
    torch.int32: ("I32", 4),
    torch.int64: ("I64", 8),
}
# Fields of config.json, by the flag with their value.
_FIELDS: dict[str, tuple[str, type]] = {
    "--num-layers": ("num_hidden_layers", int),
    "--hidden-size": ("hidden_size", int),
    "--ffn-hidden-size": ("intermediate_size", int),
    "--num-attention-heads": ("num_attention_heads", int),
    "--num-query-groups": ("num_key_value_heads", int),
    "--norm-epsilon": ("rms_norm_eps", float),
    "--vocab-size": ("vocab_size", int),
    "--rotary-base": ("rope_theta", float),
    "--rotary-percent": ("partial_rotary_factor", float),
    "--max-position-embeddings": ("max_position_embeddings", int),
    "--q-lora-rank": ("q_lora_rank", int),
    "--kv-lora-rank": ("kv_lora_rank", int),
    "--qk-head-dim": ("qk_nope_head_dim", int),
    "--qk-pos-emb-head-dim": ("qk_rope_head_dim", int),
    "--v-head-dim": ("v_head_dim", int),
    "--moe-ffn-hidden-size": ("moe_intermediate_size", int),
    "--mtp-num-layers": ("num_nextn_predict_layers", int),
    "--moe-router-topk": ("num_experts_per_tok", int),
    "--moe-router-topk-scaling-factor": ("routed_scaling_factor", float),
    "--moe-router-num-groups": ("n_group", int),
    "--moe-router-group-topk": ("topk_group", int),
    "--moe-router-score-function": ("scoring_func", str),
}
_EXPERT_KEYS = {  # n_routed_experts elsewhere
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_5_moe"), "num_experts"),
    **dict.fromkeys(("minimax_m2", "gpt_oss"), "num_local_experts"),
}
_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def family_of(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return the model_type and the extra fields of a model by its folder's name; None if the name is unknown."""
    for pattern, family, extra in FAMILIES:
        if re.search(pattern, name, re.IGNORECASE):
            return family, dict(extra)
    return None


def published_sizes(name: str) -> dict[str, Any]:
    """Return the sizes in the published config.json of a model by its folder's name; {} for other models."""
    while name not in PUBLISHED and SUFFIX.search(name):
        name = SUFFIX.sub("", name)
    return dict(PUBLISHED.get(name, {}))


def model_config(name: str, flags: Flags) -> dict[str, Any]:
    """Return the config.json of a model by its name, and the architecture flags for what is not published here.

    Raises KeyError for an unknown name, and for a model without sizes.
    """
    known = family_of(name)
    if known is None:
        raise KeyError(name)
    family, extra = known
    published = published_sizes(Path(name.rstrip("/")).name)
    if not published and not flags.get("--num-layers"):
        raise KeyError(name)
    config: dict[str, Any] = {
        "model_type": family,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in flags,
        **{field: kind(flags[flag][0]) for flag, (field, kind) in _FIELDS.items() if flags.get(flag)},
        **extra,
        **published,
    }
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    if "kv_lora_rank" not in config and flags.get("--kv-channels"):
        config["head_dim"] = int(flags["--kv-channels"][0])
    if config.pop("layer_types", None):
        kinds = [
            "full_attention" if n % 4 == 0 else "linear_attention" for n in range(1, config["num_hidden_layers"] + 1)
        ]
        config["layer_types"] = kinds
    if family == "minimax_m2":
        config["rotary_dim"] = int(config.pop("partial_rotary_factor") * config["head_dim"])
    elif family == "qwen3_5_moe":
        del config["intermediate_size"]  # every layer has experts
    _add_experts(config, flags, family)
    config |= published
    _add_rope(config, flags)
    for pattern, settings in QUANTIZED:
        if re.search(pattern, name, re.IGNORECASE):
            config["quantization_config"] = settings
            break
    if family in WITH_VISION:
        text = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
        text["model_type"] = f"{family}_text"
        whole = {"model_type": family, "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
        quantized = {key: value for key, value in config.items() if key == "quantization_config"}
        return {**whole, "vision_config": {"model_type": f"{family}_vision"}, **quantized}
    return config


def _add_experts(config: dict[str, Any], flags: Flags, family: str) -> None:
    if not flags.get("--num-experts"):
        return
    config[_EXPERT_KEYS.get(family, "n_routed_experts")] = int(flags["--num-experts"][0])
    config.setdefault("norm_topk_prob", True)
    if family not in _EXPERT_KEYS:
        layers = re.sub(r"\[([01])\]\*(\d+)", lambda run: run[1] * int(run[2]), flags["--moe-layer-freq"][0])
        layers = re.sub(r"\D", "", layers)  # one digit per layer; 0 has no experts
        config["first_k_dense_replace"] = len(layers) - len(layers.lstrip("0"))
    shared = flags.get("--moe-shared-expert-intermediate-size")
    if shared and family in _EXPERT_KEYS:
        config["shared_expert_intermediate_size"] = int(shared[0])
    elif shared:
        config["n_shared_experts"] = int(shared[0]) // config["moe_intermediate_size"]


def _add_rope(config: dict[str, Any], flags: Flags) -> None:
    """Add the stretched RoPE of Kimi and DeepSeek: YaRN, unless its factor is 1."""
    factor = float(flags["--rotary-scaling-factor"][0]) if flags.get("--rotary-scaling-factor") else 1.0
    if factor != 1.0:
        scales = {
            name: 1.0
            for name, flag in (("mscale", "--mscale"), ("mscale_all_dim", "--mscale-all-dim"))
            if flags.get(flag)
        }
        config["rope_scaling"] = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, **scales}


def write_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a model folder: config.json, a tokenizer with a chat template, and weights of the real shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(model_folder()) / name, folder / name)
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    text = config.get("text_config") or config
    try:
        model = build_empty(folder)
        shapes: dict[str, Sequence[int]] = dict(shapes_on_disk(model, dict(named_tensors(model))))
        if config["model_type"] in WITH_VISION:
            shapes = {stored_name(name): shape for name, shape in shapes.items()}
    except ConfigError:  # the doctor reports it
        layers = range(text["num_hidden_layers"])
        shapes = {f"model.layers.{layer}.input_layernorm.weight": [text["hidden_size"]] for layer in layers}
    write_sparse_weights(folder / "model.safetensors", stored_tensors(shapes, quantization_settings(config)))
    return folder


def stored_tensors(
    shapes: Mapping[str, Sequence[int]], settings: Mapping[str, Any]
) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Return shape and dtype of each stored tensor: bfloat16, or the parts of quantized weights."""
    form = format_of(settings) if settings else None
    ignore = [*NEVER_QUANTIZED, *settings.get("ignore", ())]
    stored: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    for name, shape in shapes.items():
        if form is None or len(shape) != 2 or not name.endswith(".weight") or is_ignored(name, ignore):
            stored[name] = shape, torch.bfloat16
        else:
            stored |= {f"{module_of(name)}.{part}": place for part, place in form.parts(tuple(shape)).items()}
    return stored


def write_sparse_weights(path: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
    """Write a safetensors file of zeros that occupies no disk space."""
    header, end = {}, 0
    for name, (shape, kind) in tensors.items():
        dtype, width = STORED[kind]
        size = width * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_prompts(path: Path, flags: Flags) -> Path:
    """Write the rows of one rollout with the columns that a command reads, as JSON Lines or Parquet."""

    def key(flag: str, default: str) -> str:
        return flags[flag][0] if flags.get(flag) else default

    conversation = [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "3"}]
    is_demonstration = "sft_loss" in flags.get("--loss-type", ())
    rows: list[dict[str, Any]] = []
    for number in range(int(key("--rollout-batch-size", "2"))):
        asked = [{"role": "user", "content": f"What is {number} + 2?"}]
        plain = "--apply-chat-template" not in flags and not is_demonstration
        row: dict[str, Any] = {key("--input-key", "input"): asked[0]["content"] if plain else asked}
        if is_demonstration:
            row[key("--input-key", "input")] = conversation
        if flags.get("--label-key"):
            row[key("--label-key", "label")] = str(number + 2)
        row[key("--metadata-key", "metadata")] = {"number": number}
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rewrite_paths(text: str, place: Callable[[str], str]) -> str:
    """Replace the absolute paths in the text of a YAML file, and those that begin with a variable of the script."""
    return re.sub(r"(?<![\w/.:])(?:\$\{\w+\})?(/[\w./-]+)", lambda match: place(match[1]), text)
