"""Commands of newcomers with faults of their own kind, and odd but legal settings, for the score of diagnoses."""

from __future__ import annotations

import gzip
import json
from typing import Any

from safetensors.torch import load_file, save_file

from diagnosis_score import Case, doctor, ran, steps
from faults.score_doctor import _hook, _reward, _rows, _settings
from faults.score_runs import GAP, KL
from faults.world import World

GEMMA = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"


def _file(name: str, content: bytes) -> Any:
    """Prompts in a file of this name."""

    def prepare(world: World) -> dict[str, Any]:
        path = world.folder / name
        path.write_bytes(content)
        return {"prompt_data": path}

    return prepare


def _jsonl(count: int = 8, **columns: Any) -> bytes:
    return "".join(
        json.dumps({"input": f"{i}+1=", "label": str(i + 1)} | columns) + "\n" for i in range(count)
    ).encode()


def _parquet(world: World) -> dict[str, Any]:
    import pandas

    path = world.folder / "p.parquet"
    pandas.DataFrame({"input": ["1+1="] * 8, "label": ["2"] * 8}).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-40])
    return {"prompt_data": path}


def _folder(*names: str) -> Any:
    """--load with a folder that has these files."""

    def prepare(world: World) -> dict[str, Any]:
        for name in names:
            path = world.folder / "from" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"global_step10" if path.name == "latest" else b"PK\x03\x04")
        return {"load": world.folder / "from"}

    return prepare


def _adapter(world: World) -> None:
    for path in world.model.iterdir():
        if path.name not in ("tokenizer.json", "tokenizer_config.json"):
            path.unlink()
    (world.model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')
    (world.model / "adapter_model.safetensors").write_bytes(b"12345678")


def _gguf(world: World) -> None:
    for path in world.model.glob("*.safetensors"):
        path.unlink()
    (world.model / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


def _lost_shard(world: World) -> None:
    tensors = load_file(world.model / "model.safetensors")
    (world.model / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        save_file(
            {n: tensors[n] for n in part}, world.model / f"model-0000{number}-of-00002.safetensors", {"format": "pt"}
        )
    index = {n: f"model-0000{1 if n in names[: len(names) // 2] else 2}-of-00002.safetensors" for n in names}
    (world.model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (world.model / "model-00002-of-00002.safetensors").unlink()


def _template(text: str) -> Any:
    return lambda world: (world.model / "chat_template.jinja").write_text(text) and None


COMMANDS = (
    doctor("engines larger than their GPUs", "CFG05 GPU01",
           {"engine": "embedded", "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 8}),
    doctor("GRPO with one sample", "CFG05", {"n_samples_per_prompt": 1}, remedy="--n-samples-per-prompt"),
    doctor("a negative learning rate", "CFG05", {"lr": -1e-6}),
    doctor("top-p above 1", "CFG05", {"rollout_top_p": 1.5}),
    doctor("a negative clip", "CFG05", {"eps_clip": -0.2}),
    doctor("no rollout", "CFG05", {"num_rollout": 0}),
    doctor("top-k 1", "CFG05", {"rollout_top_k": 1}, remedy="--rollout-temperature"),
    doctor("top-p 0.1", "CFG05", {"rollout_top_p": 0.1}, remedy="--rollout-temperature"),
    doctor("a save below a file of the system", "DISK01", None, lambda world: {"save": "/proc/version/save"}),
    doctor("a flag of verl", "CFG02", {"ppo_mini_batch_size": 4}),
    doctor("a flag of TRL", "CFG02", {"num_generations": 4}),
    doctor("a flag with the wrong separator", "CFG02", {"rollout_max_response_length": 8},
           remedy="--rollout-max-response-len"),
    doctor("two faults, the flag", "CFG02", {"rollout_batchsize": 4, "label_key": "answer"}, also="DATA01",
           remedy="--rollout-batch-size"),
    doctor("two faults, the column", "DATA01", {"global_batch_size": 7, "label_key": "answer"}, also="CFG01",
           remedy="--label-key label"),
    doctor("two faults, the model", "CKPT04", {"global_batch_size": 7},
           _settings("config.json", intermediate_size=200), also="CFG01"),
    doctor("negative memory", "CFG05", {"rollout_max_response_len": -5}),
)  # fmt: skip

FILES = (
    doctor("a file with no rows", "DATA01 DATA02", None, _file("p.jsonl", b"")),
    doctor("a comma-separated file named .jsonl", "DATA01", None, _file("p.jsonl", b"input,label\n1+1=,2\n" * 8)),
    doctor("a compressed file named .jsonl", "DATA01", None, _file("p.jsonl", gzip.compress(_jsonl(), mtime=0))),
    doctor("UTF-16", "DATA01", None, _file("p.jsonl", _jsonl().decode().encode("utf-16"))),
    doctor("a cut Parquet file", "DATA01 CFG05", None, _parquet),
    doctor("labels that are all null", "DATA01 DATA02", None, _file("p.jsonl", _jsonl(label=None))),
    doctor("prompts that are spaces", "DATA02", None, _file("p.jsonl", _jsonl(input="   "))),
    doctor("prompts that are numbers", "DATA01", None, _file("p.jsonl", _jsonl(input=12))),
    doctor("a folder of files", "CFG05 DATA01", None,
           lambda world: {"prompt_data": ((world.folder / "d").mkdir(), world.folder / "d")[1]}),
    doctor("prompts with Gemma's template", "TPL01", {"apply_chat_template": True},
           _rows(*({"input": GEMMA.format(f"{i}+1="), "label": "1"} for i in range(16)))),
    doctor("messages without a role", "TPL01 DATA01", {"apply_chat_template": True},
           _file("p.jsonl", _jsonl(input=[{"content": "1+1="}]))),
    doctor("messages of another library", "TPL01 DATA01", {"apply_chat_template": True},
           _file("p.jsonl", _jsonl(input=[{"from": "human", "value": "1+1="}]))),
    doctor("a template with an unknown filter", "TPL01", {"apply_chat_template": True},
           _template("{{ messages | to_yaml }}")),
    doctor("a template that refuses system prompts", "TPL01", {"apply_chat_template": True},
           lambda world: (
               _template("{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
                         "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}")(world),
               _rows(*({"input": [{"role": "system", "content": "a"}, {"role": "user", "content": "1"}], "label": "1"}
                       for _ in range(8)))(world))[0], remedy="--chat-template-path", also="STOP01"),
)  # fmt: skip

MODELS = (
    doctor("an adapter", "CKPT07", None, _adapter, also="CKPT04"),
    doctor("a GGUF file", "CKPT04 CKPT07", None, _gguf),
    doctor("a lost shard", "CKPT04", None, _lost_shard, remedy="furlong check"),
    doctor("the weights in place of the folder", "CKPT07", None,
           lambda world: {"hf_checkpoint": world.model / "model.safetensors"}),
    doctor("a cut tokenizer", "CKPT07", None,
           lambda world: (world.model / "tokenizer.json").write_bytes(
               (world.model / "tokenizer.json").read_bytes()[:500]) and None),
    doctor("an empty config.json", "CKPT07", None, lambda world: (world.model / "config.json").write_text("") and None),
    doctor("a folder that is empty", "CKPT07", None,
           lambda world: {"hf_checkpoint": ((world.folder / "e").mkdir(), world.folder / "e")[1]}),
    doctor("DeepSpeed's checkpoint", "CKPT01", None,
           _folder("latest", "global_step10/mp_rank_00_model_states.pt", "zero_to_fp32.py")),
    doctor("verl's checkpoint", "CKPT01", None,
           _folder("latest_checkpointed_iteration.txt", "global_step_10/actor/model_world_size_8_rank_0.pt")),
    doctor("a LoRA folder to load", "CKPT01", None, _folder("adapter_config.json", "adapter_model.safetensors")),
    doctor("a trainer's checkpoint of transformers", "CKPT01", None,
           _folder("checkpoint-500/optimizer.pt", "checkpoint-500/trainer_state.json")),
)  # fmt: skip

FUNCTIONS = (
    doctor("a reward file that is not there", "HOOK01 REW01 CFG05",
           {"rm_type": None, "custom_rm_path": "no/own.py:fn"}),
    doctor("a reward of None", "REW01", None, _reward("def reward(args, sample):\n    pass\n"), is_slow=True),
    doctor("a reward of NaN", "REW01", None, _reward("def reward(args, sample):\n    return float('nan')\n"),
           is_slow=True),
    doctor("a reward that prints a row's words", "REW01", None,
           _reward("def reward(args, sample):\n    raise ValueError('grader said: CUDA out of memory')\n"),
           without="--max-tokens-per-gpu|mem-fraction", is_slow=True),
    doctor("a generate function that is not async", "HOOK01", None,
           _hook("custom_generate_function_path", "def generate(args, sample, sampling_params):\n    return sample\n",
                 "generate")),
    doctor("a class in place of a function", "HOOK01", None,
           _hook("custom_generate_function_path", "class generate:\n    pass\n", "generate")),
    doctor("a filter that needs another argument", "HOOK01", None,
           _hook("dynamic_sampling_filter_path", "def keep(args, samples, threshold):\n    return True\n", "keep")),
    doctor("a number in place of a function", "HOOK01", None,
           _hook("dynamic_sampling_filter_path", "keep = 3\n", "keep")),
    doctor("an import that divides by zero", "HOOK01", None,
           _hook("custom_generate_function_path", "1 / 0\n", "generate")),
    doctor("tabs and spaces", "HOOK01", None,
           _hook("custom_generate_function_path", "async def generate(a, b):\n\tx = 1\n        y = 2\n", "generate")),
)  # fmt: skip

METRICS = (
    steps("all responses cut off at 4,096", "STOP02", [{"rollout/truncated_ratio": 1.0}] * 3,
          {"rollout_max_response_len": 4096}),
    steps("rewards flat at -1", "REW02",
          [{"rollout/zero_std_frac": 1.0, "rollout/raw_reward": -1.0, "rollout/reward_range": 0.0}] * 6),
    steps("a gap that appears after twenty steps", "NUM02", [{GAP: 0.003}] * 20 + [{GAP: 0.9}] * 3),
    steps("gradients that grow by 100 twice", "NUM03", [{"train/grad_norm": 0.5}] * 15 + [{"train/grad_norm": 60.0}]),
    steps("half of the rewards fail", "REW03", [{"rollout/reward_failed": 64.0}] * 2,
          {"rollout_batch_size": 16, "n_samples_per_prompt": 8}),
    steps("experts of which a third differ", "NUM05", [{"train/routing_agreement": 0.66}] * 3),
    steps("KL of 40 at the first step", "NUM01", [{"train/kl_loss": 40.0}], KL),
)  # fmt: skip

ODD = (
    doctor("odd: evaluation data without a name", "", None,
           lambda world: {"eval_prompt_data": [world.data], "eval_interval": 1}),
    *(doctor(f"odd: {name}", "", flags) for name, flags in {
        "one token": {"rollout_max_response_len": 1},
        "two tokens, hot": {"rollout_max_response_len": 2, "rollout_temperature": 2.0},
        "one prompt": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
        "one step": {"num_rollout": 1},
        "a learning rate of 0": {"lr": 0.0},
        "many steps per rollout": {"num_steps_per_rollout": 16},
        "no clipping of gradients": {"clip_grad": 0.0},
        "a large entropy bonus": {"entropy_coef": 0.1},
        "RLOO with two samples": {"advantage_estimator": "rloo", "n_samples_per_prompt": 2},
        "no label for random rewards": {"rm_type": "random", "label_key": None},
        "cosine decay": {"lr_decay_style": "cosine", "lr_decay_iters": 2, "lr": 1e-3},
        "only engines": {"debug_rollout_only": True},
        "two updates apart, three ahead": {"async_buffer_size": 3, "update_weights_interval": 2},
        "a minimum of tokens": {"rollout_min_new_tokens": 4, "rollout_max_response_len": 32},
        "per-token loss": {"calculate_per_token_loss": True},
        "no standard deviation": {"disable_grpo_std_normalization": True},
        "the whole context": {"rollout_max_context_len": 256, "rollout_max_response_len": 200},
        "a seed of 0": {"rollout_seed": 0, "seed": 1},
    }.items()),
    doctor("odd: a byte order mark", "", None, _file("p.jsonl", b"\xef\xbb\xbf" + _jsonl())),
    doctor("odd: Windows line ends", "", None, _file("p.jsonl", _jsonl().replace(b"\n", b"\r\n"))),
    doctor("odd: no last line end", "", None, _file("p.jsonl", _jsonl().rstrip())),
    doctor("odd: a row of 40,000 digits in metadata", "", None,
           _file("p.jsonl", _jsonl(metadata={"tests": "1" * 40_000}))),
    doctor("odd: prompts in Chinese", "", None, _file("p.jsonl", _jsonl(input="一加一等于几？"))),
    doctor("odd: a label for all", "", None, _file("p.jsonl", _jsonl(label="7"))),
    doctor("odd: one prompt for all", "", None, _file("p.jsonl", _jsonl(input="1+1="))),
    doctor("odd: prompts that quote a template's words", "", {"apply_chat_template": True},
           _file("p.jsonl", _jsonl(input="What does <|im_start|> mean in a prompt?"))),
    doctor("odd: prompts with system turns", "", {"apply_chat_template": True},
           _file("p.jsonl", _jsonl(input=[{"role": "system", "content": "Be brief."},
                                          {"role": "user", "content": "1+1="}]))),
    doctor("odd: a conversation of 20 turns", "", {"apply_chat_template": True},
           _file("p.jsonl", _jsonl(input=[{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"}
                                          for i in range(19)]))),
    doctor("odd: a name with spaces and umlauts", "", None, _file("prüf daten.jsonl", _jsonl())),
    doctor("odd: float64 weights", "", None,
           lambda world: save_file({n: t.double() for n, t in load_file(world.model / "model.safetensors").items()},
                                   world.model / "model.safetensors", {"format": "pt"})),
    doctor("odd: weights of bfloat16", "", None,
           lambda world: save_file({n: t.bfloat16() for n, t in load_file(world.model / "model.safetensors").items()},
                                   world.model / "model.safetensors", {"format": "pt"})),
    doctor("odd: a README and .gitattributes beside the weights", "", None,
           lambda world: [(world.model / name).write_text("x") for name in ("README.md", ".gitattributes")] and None),
    doctor("odd: a reward that is a tensor", "", None,
           _reward("import torch\n\n\ndef reward(args, sample):\n    return torch.tensor(1.0)\n"), is_slow=True),
    doctor("odd: a reward that is a bool", "", None,
           _reward("def reward(args, sample):\n    return sample.label in sample.response\n"), is_slow=True),
    doctor("odd: a reward of NumPy", "", None,
           _reward("import numpy\n\n\ndef reward(args, sample):\n    return numpy.float32(0.5)\n"), is_slow=True),
    steps("odd: responses of one token", "", [{"rollout/response_len/mean": 1.0, "rollout/truncated_ratio": 0.0,
                                              "rollout/zero_std_frac": 0.6, "rollout/raw_reward": 0.5,
                                              "rollout/reward_range": 1.0}] * 8),
    steps("odd: a rising gap that stays small", "", [{GAP: 0.002 * i} for i in range(8)]),
    steps("odd: gradients that fall to 1e-6", "", [{"train/grad_norm": 1.0 * 0.3**i} for i in range(14)]),
    steps("odd: no reward for the first two of ten", "", [
        {"rollout/zero_std_frac": 1.0, "rollout/raw_reward": 0.0, "rollout/reward_range": 0.0}] * 2 + [
        {"rollout/zero_std_frac": 0.9, "rollout/raw_reward": i / 100, "rollout/reward_range": 1.0} for i in range(10)]),
    steps("odd: an evaluation that waits long", "", [{"perf/rollout_time": 300.0, "perf/step_time": 900.0,
                                                      "perf/update_weights_time": 20.0}] * 3),
    ran("run: one token", "", {"rollout_max_response_len": 1, "rm_type": "random"}),
    ran("run: temperature 2", "", {"rollout_temperature": 2.0}),
    ran("run: a large entropy bonus", "", {"entropy_coef": 0.05}),
    ran("run: one prompt, two samples", "", {"rollout_batch_size": 1, "n_samples_per_prompt": 2}),
    ran("run: a learning rate of 0", "", {"lr": 0.0}),
)  # fmt: skip

FAULTS: tuple[Case, ...] = (*COMMANDS, *FILES, *MODELS, *FUNCTIONS, *METRICS)
CASES: tuple[Case, ...] = (*FAULTS, *ODD)
