"""Faults of launch commands, their models, data and functions, for the score of diagnoses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from diagnosis_score import Case, doctor
from faults.test_preflight_checkpoints import write_checkpoint
from faults.world import World
from furlong.files.checkpoint_folder import TRACKER, folder_name

MISSING_CUDA = not Path("/dev/nvidia0").exists()
LLAMA = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
QWEN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
BROKEN_TEMPLATE = "{% for m in messages %}\n{{ m.content }"
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if not loop.last and m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KL = {"use_kl_loss": True, "kl_loss_coef": 0.01}


def _prompts(text: str, *, first: str = "") -> Any:
    """Prompts in this form; the first one may have another."""

    def prepare(world: World) -> None:
        texts = [text.format(f"{i}+1=") for i in range(16)]
        world.write(*({"input": each, "label": "1"} for each in ([first] * bool(first) + texts)))

    return prepare


def _rows(*rows: Any) -> Any:
    return lambda world: world.write(*rows)


def _messages(*, as_text: bool = False) -> Any:
    messages = [{"role": "user", "content": "1+1="}]
    return _rows(*({"input": json.dumps(messages) if as_text else messages, "label": "2"} for _ in range(8)))


def _settings(file: str, **changes: Any) -> Any:
    """A JSON file of the model with other values."""

    def prepare(world: World) -> None:
        path = world.model / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return prepare


def _hook(flag: str, text: str, name: str, **flags: Any) -> Any:
    """A user's function."""

    def prepare(world: World) -> dict[str, Any]:
        (world.folder / "own.py").write_text(text)
        return {flag: f"{world.folder}/own.py:{name}", **flags}

    return prepare


def _reward(text: str, **flags: Any) -> Any:
    return _hook("custom_rm_path", text, "reward", rm_type=None, **flags)


def _tensors(change: Any) -> Any:
    """The model's tensors, changed."""

    def prepare(world: World) -> None:
        path = world.model / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return prepare


def _checkpoints(*done: int, change: Any = None, **flags: Any) -> Any:
    def prepare(world: World) -> dict[str, Any]:
        save = world.folder / "save"
        for step in done:
            write_checkpoint(save, step)
        if change is not None:
            change(save)
        return {"load": save, "num_rollout": 9} | flags

    return prepare


def _forgetful(world: World) -> None:
    (world.model / "chat_template.jinja").write_text(FORGETFUL)
    turns = [("user", "1+1"), ("assistant", "<think>easy</think>2"), ("user", "and 2+2?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    world.write(*({"input": messages, "label": "4"} for _ in range(4)))


def _torch_dist(save: Path) -> None:
    """What Megatron-LM saves as torch_dist: no manifest of furlong."""
    folder = save / folder_name(3)
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "common.pt"):
        (folder / name).write_bytes(b"12345678")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (save / TRACKER).write_text("3")


def _ends_with_the_start_of_a_turn(world: World) -> None:
    for name in ("config.json", "generation_config.json"):
        _settings(name, eos_token_id=2)(world)
    _settings("tokenizer_config.json", eos_token="<|im_start|>")(world)


FLAGS = (
    doctor("steps that do not divide", "CFG01", {"global_batch_size": 6, "num_steps_per_rollout": 2},
           remedy="--global-batch-size|--num-steps-per-rollout"),
    doctor("a batch that is no multiple", "CFG01", {"global_batch_size": 7}, remedy="--global-batch-size"),
    doctor("more steps than samples", "CFG01", {"num_steps_per_rollout": 5}, remedy="--num-steps-per-rollout"),
    doctor("a misspelled flag", "CFG02", {"rollout_batchsize": 4}, remedy="--rollout-batch-size"),
    doctor("a flag with a missing letter", "CFG02", {"kl_los_coef": 0.1}, remedy="--kl-loss-coef"),
    doctor("an engine's flag without engines", "CFG02", {"sglang_mem_fraction_static": 0.4}),
    doctor("a threshold without its switch", "CFG02", {"opsm_delta": 0.1}, remedy="--use-opsm"),
    doctor("a KL loss without a gradient", "CFG02", KL, remedy="--kl-loss-type"),
    doctor("log folder without servers", "CFG02 CFG05", {"sglang_log_dir": "x"}, remedy="--rollout-num-gpus"),
    doctor("colocated and asynchronous", "CFG03", {"colocate": True, "async_buffer_size": 2},
           remedy="--rollout-num-gpus|--async-buffer-size 0"),
    doctor("a token limit without dynamic batches", "CFG04", {"max_tokens_per_gpu": 64, "micro_batch_size": 2},
           remedy="add that flag"),
    doctor("a learning rate in words", "CFG05", {"lr": "fast"}, remedy="correct it"),
    doctor("min-lr above lr", "CFG05", {"min_lr": 2.0}, remedy="lower it"),
    doctor("over-sampling below the batch", "CFG05", {"over_sampling_batch_size": 2},
           remedy="raise it to 4"),
    doctor("saves without a folder", "CFG02 CFG05", {"save_interval": 2}, remedy="--save"),
    doctor("evaluations without data", "CFG02 CFG05", {"eval_interval": 2}, remedy="--eval-"),
    doctor("an unknown algorithm", "CFG05", {"advantage_estimator": "gpro"}, remedy="correct it"),
    doctor("whitening left out", "CFG05", {"advantage_estimator": "reinforce_plus_plus"},
           remedy="--normalize-advantages"),
    doctor("engines of three GPUs by two", "CFG05", {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
           remedy="2 or 4"),
    doctor("a data format without support", "CFG05", None,
           lambda world: {"prompt_data": (world.folder / "p.csv", (world.folder / "p.csv").write_text("a,b"))[0]},
           remedy=".jsonl"),
    doctor("a data file that is not there", "CFG05 DATA01", {"prompt_data": "nowhere/p.jsonl"}),
    doctor("more threads than processors", "ENV02", {"num_threads": 999}, remedy="--num-threads"),
    doctor("determinism with rollouts ahead", "DET01", {"debug_determinism": True, "async_buffer_size": 1},
           remedy="--async-buffer-size 0"),
    doctor("checkpoints for which no disk suffices", "DISK01", None,
           lambda world: {"save": world.folder / "save", "save_interval": 1, "num_rollout": 10**12},
           remedy="--keep-checkpoints"),
    doctor("a folder below a file", "DISK01", None,
           lambda world: {"save": world.data / "save"}, remedy="--save"),
    doctor("no Ray cluster at an address", "GPU05",
           {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1, "ray_address": "127.0.0.1:1"},
           remedy="ray start"),
    doctor("no engine at an address", "ENG05", {"rollout_external_engine_addrs": ["127.0.0.1:1"]}),
    *((doctor("SGLang without a GPU", "CFG05 GPU01", {"engine": "sglang", "rollout_num_gpus": 1}, also="ENV01 CFG05"),)
      * MISSING_CUDA),
)  # fmt: skip

FUNCTIONS = (
    doctor("a module that is not there", "HOOK01", {"loss_type": "custom_loss"},
           _hook("custom_loss_function_path", "import not_there_7261\n", "loss")),
    doctor("a function that is not there", "HOOK01", {"loss_type": "custom_loss"},
           _hook("custom_loss_function_path", "def los(args): ...\n", "loss")),
    doctor("a function with other arguments", "HOOK01", None,
           _hook("custom_generate_function_path", "async def generate(prompt): ...\n", "generate"),
           remedy="args, sample, sampling_params"),
    doctor("slime's module", "HOOK01", None,
           _hook("custom_generate_function_path", "from slime.agent.trajectory import TurnRecord\n", "generate"),
           remedy="furlong.agent.policy()"),
    doctor("slime's types of images", "HOOK01", None,
           _hook("custom_generate_function_path", "from slime.utils.types import MultimodalTypes\n", "generate"),
           remedy="train on text"),
    doctor("a syntax error", "HOOK01", None,
           _hook("custom_generate_function_path", "async def generate(args, sample\n", "generate")),
    doctor("tool output without a mask", "TOOL01", None,
           _hook("custom_generate_function_path",
                 "async def generate(args, sample, sampling_params):\n    for turn in range(2):\n"
                 "        sample.tokens += [1]\n    return sample\n", "generate"),
           remedy="trainable=False"),
    doctor("a reward that raises", "REW01", None,
           _reward("def reward(args, sample, **kw):\n    return float(sample.label['x'])\n"), is_slow=True),
    doctor("a reward whose server refuses", "REW01", None,
           _reward("import urllib.request\n\n\ndef reward(args, sample, **kw):\n"
                   "    return urllib.request.urlopen('http://127.0.0.1:1').status\n"),
           without="label", is_slow=True),
    doctor("a reward that exits", "REW01", None,
           _reward("import os\n\n\ndef reward(args, sample, **kw):\n    os._exit(3)\n"), without="label", is_slow=True),
    doctor("a reward that a signal ends", "REW01", None,
           _reward("import os\n\n\ndef reward(args, sample, **kw):\n    os.kill(os.getpid(), 11)\n"),
           without="label", is_slow=True),
    doctor("a reward without the label", "REW01", None, _reward("def reward(sample):\n    return 1.0\n"),
           remedy="def fn(args, sample)"),
    doctor("a reward of several values", "REW01", None,
           _reward("def reward(args, sample, **kw):\n    return {'score': 1.0, 'acc': 0}\n"),
           remedy="--reward-key", is_slow=True),
    doctor("another key of a reward", "REW01", None,
           _reward("def reward(args, sample, **kw):\n    return {'score': 1.0}\n", reward_key="acc"),
           remedy="--reward-key", is_slow=True),
    doctor("a reward of text", "REW01", None, _reward("def reward(args, sample, **kw):\n    return 'good'\n"),
           is_slow=True),
    doctor("no reward server", "REW01", {"rm_type": "remote_rm", "rm_url": "http://127.0.0.1:1/"},
           remedy="--rm-url"),
    doctor("labels that are no formulas", "REW01", None,
           _rows(*({"input": str(i), "label": "n/a because \\frac{"} for i in range(8))), remedy="--label-key"),
)  # fmt: skip

DATA = (
    doctor("prompts with the template already", "TPL01", {"apply_chat_template": True}, _prompts(QWEN),
           remedy="--apply-chat-template"),
    doctor("templated prompts behind a plain one", "TPL01", {"apply_chat_template": True},
           _prompts(QWEN, first="1+1="), remedy="in one form"),
    doctor("messages without a template", "TPL01", None, _messages(), remedy="--apply-chat-template"),
    doctor("messages as text", "TPL01", None, _messages(as_text=True), remedy="fromjson"),
    doctor("prompts of another model", "TPL01", None, _prompts(LLAMA)),
    doctor("a template with an error", "TPL01", {"apply_chat_template": True},
           lambda world: (world.model / "chat_template.jinja").write_text(BROKEN_TEMPLATE) and None),
    doctor("a template that drops thoughts", "TPL02",
           {"apply_chat_template": True, "loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None},
           _forgetful),
    doctor("an end of turn that does not end", "STOP01", {"apply_chat_template": True},
           _ends_with_the_start_of_a_turn, remedy="--rollout-stop-token-ids"),
    doctor("a stop id beyond the vocabulary", "STOP01", {"rollout_stop_token_ids": [99_999]},
           remedy="this tokenizer"),
    doctor("one row without a label", "DATA01", None,
           _rows(*({"input": str(i), ("label", "answer")[i == 6]: "1"} for i in range(20))), remedy="--skip-bad-rows"),
    doctor("another column for labels", "DATA01", {"label_key": "labels"}, remedy="--label-key label"),
    doctor("another column for prompts", "DATA01", {"input_key": "question"}, remedy="--input-key"),
    doctor("rows in Latin-1", "DATA01", None,
           lambda world: world.data.write_bytes('{"input": "Größe", "label": "1"}\n'.encode("latin-1") * 8) and None,
           remedy="iconv"),
    doctor("one JSON document", "DATA01", None,
           lambda world: world.data.write_text(json.dumps([{"input": "1", "label": "1"}], indent=1)) and None,
           remedy="jq"),
    doctor("rows that are lists", "DATA01", None, _rows("[1, 2]", "[3, 4]"), remedy="object"),
    doctor("broken rows far behind", "DATA01", None,
           _rows(*({"input": str(i), "label": str(i)} for i in range(1000)), *["{broken"] * 1000)),
    doctor("JSON Lines in a .json file", "DATA01 CFG05", None,
           lambda world: {"prompt_data": world.data.rename(world.folder / "prompts.json")},
           remedy=".jsonl", without="jq"),
    doctor("an empty label", "DATA02", {"rollout_batch_size": 1},
           _rows({"input": "1", "label": ""}, {"input": "3", "label": "3"}), remedy="--skip-bad-rows"),
    doctor("prompts above the limit", "DATA04", {"rollout_max_prompt_len": 15},
           _rows(*({"input": "1" * (10 + i), "label": "1"} for i in range(20))), remedy="--rollout-max-prompt-len"),
    doctor("prompts above the context", "DATA04", {"rollout_max_context_len": 32},
           _rows(*({"input": "1" * 100, "label": "1"} for _ in range(20))), remedy="--rollout-max-"),
)  # fmt: skip

MODELS = (
    doctor("a name on the hub", "CKPT07", {"hf_checkpoint": "Qwen/Qwen3-4B"}, remedy="hf download"),
    doctor("no tokenizer", "CKPT07", None, lambda world: (world.model / "tokenizer.json").unlink()),
    doctor("an unknown family", "CKPT07", None, _settings("config.json", model_type="qwen99")),
    doctor("pickled weights", "CKPT07", None,
           lambda world: (world.model / "model.safetensors").rename(world.model / "pytorch_model.bin") and None,
           remedy=".save_pretrained("),
    doctor("a config that is cut off", "CKPT07", None,
           lambda world: (world.model / "config.json").write_text('{"model_type": "qw') and None),
    doctor("a shard that is cut off", "CKPT04", None,
           lambda world: (world.model / "model.safetensors").write_bytes(
               (world.model / "model.safetensors").read_bytes()[:-100]) and None),
    doctor("a pointer of Git LFS", "CKPT04", None,
           lambda world: (world.model / "model.safetensors").write_text(
               "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n") and None),
    doctor("a layer that is missing", "CKPT04", None,
           _tensors(lambda t: [t.pop(name) for name in [*t] if ".layers.3." in name])),
    doctor("a tensor that is missing", "CKPT04", None,
           _tensors(lambda t: t.pop("model.layers.3.mlp.up_proj.weight"))),
    doctor("the embedding is missing", "CKPT04", None, _tensors(lambda t: t.pop("model.embed_tokens.weight"))),
    doctor("shapes unlike config.json", "CKPT04", None, _settings("config.json", intermediate_size=200)),
    doctor("more layers in config.json", "CKPT04", None, _settings("config.json", num_hidden_layers=7)),
    doctor("an embedding smaller than the tokenizer", "CKPT04 CKPT07", None,
           _settings("config.json", vocab_size=8), also="STOP01 CKPT04"),
    doctor("rope_theta in words", "CKPT07", None,
           _settings("config.json", rope_parameters={"rope_theta": "x", "rope_type": "default"})),
    doctor("a quantized folder for the default backend", "QNT03 QNT01 QNT02 CFG05 CKPT07", None,
           _settings("config.json", quantization_config={"quant_method": "compressed-tensors", "ignore": ["lm_head"]}),
           also="QNT01 QNT02"),
    doctor("a reference with fewer tokens", "NUM01", {"use_kl_loss": True},
           lambda world: _settings("config.json", vocab_size=3)(world) or {"ref_load": world.model},
           remedy="--ref-load", also="CKPT04 CKPT07 STOP01"),
)  # fmt: skip

CHECKPOINTS = (
    doctor("no checkpoint in a folder", "CKPT01", None,
           _checkpoints(change=lambda save: (save.mkdir(), (save / "notes.txt").touch())), remedy="--save"),
    doctor("a checkpoint that lost bytes", "CKPT01", None,
           _checkpoints(2, 4, change=lambda save: (
               save / folder_name(4) / "trainer" / "trainer_weights.safetensors").write_bytes(b"1")),
           remedy="--ckpt-step 2"),
    doctor("no newest checkpoint named", "CKPT01", None,
           _checkpoints(2, 4, change=lambda save: (save / TRACKER).unlink()), remedy="--ckpt-step"),
    doctor("one checkpoint in place of the folder", "CKPT01", None,
           lambda world: _checkpoints(2)(world) | {"load": world.folder / "save" / folder_name(2)},
           remedy="--ckpt-step 2"),
    doctor("a checkpoint of torch_dist with fsdp", "CKPT01 CFG05", None, _checkpoints(change=_torch_dist),
           remedy="--train-backend megatron", without="interrupted"),
    doctor("a step that was not saved", "CKPT02", None, _checkpoints(2, 4, 8, ckpt_step=7), remedy="--ckpt-step 8"),
    doctor("a step that was removed", "CKPT02", None, _checkpoints(6, 8, ckpt_step=2), remedy="--ckpt-step 6"),
    doctor("checkpoints that would be overwritten", "CKPT08", None,
           lambda world: {"save": _checkpoints(2, 4)(world)["load"], "num_rollout": 9}, remedy="--load|--save"),
    doctor("a step without checkpoints to load", "CFG02", None, lambda world: {"load": world.model, "ckpt_step": 3},
           remedy="remove it"),
)  # fmt: skip

CASES: tuple[Case, ...] = (*FLAGS, *FUNCTIONS, *DATA, *MODELS, *CHECKPOINTS)
