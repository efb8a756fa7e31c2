"""Faults and healthy settings that were written before they were run, for the score of diagnoses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas
import torch
from safetensors.torch import load_file, save_file

from diagnosis_score import Case, Flags, case, doctor, log, ran, steps
from faults.score_doctor import _prompts, _reward, _rows, _settings
from faults.score_folders import _examined, _failed
from faults.score_reports import SRT, _engine, _raised, _rank
from faults.score_runs import GAP, GOOD, KL, _rewards
from faults.score_strangers import _file, _folder
from faults.world import World
from furlong.errors import ENGINE_EXITED, ENGINE_HANGS

Change = Callable[[World], Flags | None]
PHI = "<|user|>\n{}<|end|>\n<|assistant|>\n"
WHITENED: dict[str, Any] = {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True}
THREE_ENGINES = {"engine-2.log": "Fatal Python error: of the dead\n", "engine-1.log": "of the survivor\n"}
STANDS_STILL = (
    "engine 0 at http://127.0.0.1:9 (process 8) stands still while it starts: process 8 has been stopped by a signal"
)


def _two_shards(*, wrong: bool) -> Change:
    """Two shards with an index, which may name the wrong one for a tensor."""

    def prepare(world: World) -> None:
        path = world.model / "model.safetensors"
        tensors = load_file(path)
        path.unlink()
        names = sorted(tensors)
        half = len(names) // 2
        parts = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
        for file, part in parts.items():
            save_file({name: tensors[name] for name in part}, world.model / file, {"format": "pt"})
        weight_map = {name: file for file, part in parts.items() for name in part}
        if wrong:
            weight_map[names[0]] = weight_map[names[-1]]
        (world.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return prepare


def _head(noise: float) -> Change:
    """An output layer beside the tied embedding: a copy of it, with noise."""

    def prepare(world: World) -> None:
        _settings("config.json", tie_word_embeddings=True)(world)
        path = world.model / "model.safetensors"
        tensors = load_file(path)
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = (embedding + noise * torch.randn(embedding.shape)).to(embedding.dtype)
        save_file(tensors, path, {"format": "pt"})

    return prepare


def _hub_cache(world: World) -> Flags:
    snapshot = world.folder / "models--Qwen--Qwen3-4B" / "snapshots" / "abcdef"
    snapshot.parent.mkdir(parents=True)
    world.model.rename(snapshot)
    return {"hf_checkpoint": snapshot.parent.parent}


def _scattered(world: World) -> None:
    texts = [PHI.format(f"{i}+1=") if i in (5, 9, 10) else f"{i}+1=" for i in range(16)]
    world.write(*({"input": text, "label": "1"} for text in texts))


def _parquet(world: World) -> Flags:
    path = world.folder / "p.parquet"
    rows = [{"input": f"{i}+1=", "label": str(i + 1), "level": i} for i in range(16)]
    pandas.DataFrame(rows).to_parquet(path)
    return {"prompt_data": path}


def _asked(url: str) -> Any:
    return _reward(
        "import urllib.request\n\n\ndef reward(args, sample, **kw):\n"
        f"    return urllib.request.urlopen('{url}').status\n"
    )


def _returned(value: str) -> Any:
    return _reward(f"def reward(args, sample, **kw):\n    return {value}\n")


FAULTS: tuple[Case, ...] = (
    steps("a gap of 2 per token with a little encoded again", "NUM02",
          [{GAP: 2.1, "selftest/share/retokenisation": 0.05, "selftest/share/numerics": 0.95}],
          without="use the same precision"),
    steps("no response ends at temperature 1.8", "STOP02", [{"rollout/truncated_ratio": 1.0}] * 2,
          {"rollout_temperature": 1.8, "rollout_max_response_len": 512}, remedy="--rollout-temperature"),
    steps("a KL in the reward that wins", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)], WHITENED | {"kl_coef": 50.0},
          remedy="a lower --kl-coef", without="a larger --kl"),
    steps("a collapse with a small KL in the reward", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)],
          WHITENED | {"kl_coef": 0.01}, remedy="a larger --kl-coef (now 0.01)", without="--use-kl-loss"),
    steps("every reward 0.3", "REW02", _rewards(0.3, 0.3, 0.3, 0.3), remedy="reward function",
          without="too hard|too easy"),
    steps("a policy that fades beside an entropy bonus", "REW02", [*GOOD, *_rewards(*[0.01] * 9, flat=False)],
          {"entropy_coef": 0.2}, remedy="--entropy-coef"),
    doctor("a head with noise beside a tied embedding", "CKPT03", None, _head(0.01), remedy="tie_word_embeddings",
           without="quantiz"),
    doctor("Megatron's older format", "CKPT01", None,
           _folder("latest_checkpointed_iteration.txt", "iter_0000100/mp_rank_00/model_optim_rng.pt"),
           without="interrupted"),
    doctor("a checkpoint of torch.distributed", "CKPT01", None, _folder("__0_0.distcp", ".metadata"),
           without="interrupted"),
    doctor("NeMo's file", "CKPT01 CKPT07", None, _folder("model.nemo", "weights/common.pt")),
    doctor("an index that names the wrong shard", "CKPT04", None, _two_shards(wrong=True)),
    doctor("a folder of the hub's cache", "CKPT07", None, _hub_cache, remedy="snapshots"),
    doctor("prompts in Llama 2's format", "TPL01", {"apply_chat_template": True}, _prompts("[INST] {} [/INST]")),
    doctor("three rows of 16 in another format", "TPL01", {"apply_chat_template": True}, _scattered),
    doctor("a name on the hub for data", "CFG05 DATA01", {"prompt_data": "openai/gsm8k"}),
    doctor("a file that ends in .jsonl.gz", "CFG05 DATA01", None, _file("p.jsonl.gz", b"\x1f\x8b12345")),
    doctor("every second label is null", "DATA01 DATA02", None,
           _rows(*({"input": str(i), "label": "1" if i % 2 else None} for i in range(20)))),
    doctor("a reward whose host has no address", "REW01", None, _asked("http://no.such.host.invalid/"),
           without="label", is_slow=True),
    doctor("a reward that calls sys.exit(0)", "REW01", None, _returned("__import__('sys').exit(0)"), without="label",
           is_slow=True),
    doctor("a reward of infinity", "REW01", None, _returned("float('inf')"), is_slow=True),
    doctor("a reward of a list", "REW01", None, _returned("[1.0, 0.0]"), is_slow=True),
    doctor("a reward without memory", "REW01", None, _returned("bytearray(1 << 60)"), without="label", is_slow=True),
    doctor("a temperature with two letters missing", "CFG02", {"rollout_temprature": 0.7},
           remedy="--rollout-temperature"),
    doctor("a flag of OpenRLHF", "CFG02", {"micro_train_batch_size": 4}, remedy="--micro-batch-size"),
    doctor("32 samples in batches of 20", "CFG01",
           {"n_samples_per_prompt": 8, "rollout_batch_size": 4, "global_batch_size": 20}, remedy="--global-batch-size"),
    case("an engine of three that crashed", "ENG03",
         _examined(upto="save", logs=THREE_ENGINES, more=_failed(
             "EngineError", "engine 2 at http://127.0.0.1:9: process 8 was ended by signal 11", ENGINE_EXITED)),
         remedy="of the dead", without="of the survivor"),
    case("an engine that stands still while it starts", "ENG03",
         _examined(upto="start", more=_failed("EngineError", STANDS_STILL, ENGINE_HANGS)), remedy="SIGSTOP"),
    log("too many open files", "LIMIT01",
        _raised("OSError: [Errno 24] Too many open files: '/data/a'", "furlong/data/dataset.py:read"),
        remedy="ulimit -n"),
    log("no more threads", "LIMIT01",
        _raised("RuntimeError: can't start new thread", "/usr/lib/python3.12/threading.py:start"), remedy="ulimit -u"),
    log("a disk that is read-only", "FILE01 DISK01",
        _raised("OSError: [Errno 30] Read-only file system: '/ckpt/iter_3'", "furlong/run/run_folder.py:make")),
    log("a stale handle of NFS", "FILE01 DISK01",
        _raised("OSError: [Errno 116] Stale file handle: '/nfs/ckpt/iter_3'", "furlong/files/atomic.py:write")),
    log("a certificate of a proxy", "NET01",
        _raised("ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed "
                "certificate", "furlong/rewards/remote.py:ask")),
    log("memory errors of a GPU", "GPU06",
        _rank(_raised("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
                      "furlong/training/worker.py:forward_backward"))),
    log("a GPU that left the bus", "GPU06",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
    log("a token beyond the embedding", "ENG01 GPU06 CKPT04",
        _engine(_raised("torch.AcceleratorError: CUDA error: device-side assert triggered",
                        f"{SRT}layers/vocab_parallel_embedding.py:forward"))),
)  # fmt: skip

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_CHAT = {"apply_chat_template": True}
_NORMS = (18, 22, 25, 17, 30, 21, 19, 26, 40, 22, 21, 55, 20)
HEALTHY: tuple[Case, ...] = (
    doctor("labels that are integers", "", None, _rows(*({"input": f"{i}+1=", "label": i + 1} for i in range(16)))),
    doctor("a column of messages", "", _CHAT | {"input_key": "messages"},
           _rows(*({"messages": [{"role": "user", "content": f"{i}+1="}], "label": "1"} for i in range(16)))),
    doctor("two stop strings", "", {"rollout_stop": ["###", "\n\n\n"]}),
    doctor("F1 as the reward", "", {"rm_type": "f1"}),
    doctor("an async reward", "", None,
           _reward("async def reward(args, sample, **kw):\n    return float(sample.label in sample.response)\n"),
           is_slow=True),
    doctor("a reward that is an object", "", None,
           _reward("class Grader:\n    def __call__(self, args, sample, **kw):\n        return 0.5\n\n\n"
                   "reward = Grader()\n"), is_slow=True),
    doctor("a reward that is a partial function", "", None,
           _reward("import functools\n\n\ndef grade(args, sample, scale, **kw):\n    return scale\n\n\n"
                   "reward = functools.partial(grade, scale=2.0)\n"), is_slow=True),
    doctor("a copy of the tied embedding", "", None, _head(0.0)),
    doctor("two shards with an index", "", None, _two_shards(wrong=False)),
    doctor("no generation_config.json", "", None,
           lambda world: (world.model / "generation_config.json").unlink(missing_ok=True)),
    doctor("Parquet with more columns", "", None, _parquet),
    doctor("the first rows of a file", "", None, lambda world: {"prompt_data": f"{world.data}@[0:8]"}),
    doctor("the last rows of a file", "", None, lambda world: {"prompt_data": f"{world.data}@[-8:]"}),
    doctor("a folder with spaces and dots", "", None,
           lambda world: {"save": world.folder / "my runs" / "..x" / "a b", "save_interval": 1}),
    doctor("nested metadata", "", None,
           _rows(*({"input": f"{i}+1=", "label": "1", "metadata": {"a": [{"c": None}]}} for i in range(16)))),
    doctor("tools in rows", "", _CHAT | {"tool_key": "tools"},
           _rows(*({"input": [{"role": "user", "content": "1"}], "label": "1", "tools": [_TOOL]} for _ in range(8)))),
    doctor("dual clip", "", {"eps_clip_c": 3.0}),
    doctor("a large seed", "", {"rollout_seed": 2**31 - 1}),
    doctor("prompts in tags of their own", "", _CHAT, _prompts("<math>{}</math>")),
    doctor("one prompt that asks about a template", "", _CHAT, _prompts("{}", first="What does [INST] mean?")),
    doctor("tabs and line ends in prompts", "", None,
           _rows(*({"input": f"\t{i}\n+1=\r\n", "label": "1"} for i in range(16)))),
    steps("89 % of the responses cut off", "", [{"rollout/truncated_ratio": 0.89}] * 5,
          {"rollout_max_response_len": 64}),
    steps("a KL that rises to 0.9", "", [{"train/kl_loss": 0.03 * i} for i in range(30)], KL),
    steps("log-probs of -0.95 in a chat", "", [{"rollout/log_probs": -0.95}], _CHAT),
    steps("gradients around 20", "", [{"train/grad_norm": norm} for norm in _NORMS]),
    steps("rewards of 0.5 on average", "", [{"rollout/zero_std_frac": 0.0, "rollout/raw_reward": 0.5,
                                            "rollout/reward_range": 1.0}] * 10),
    steps("responses that grow", "", [{"rollout/response_len/mean": 100 * 1.1**i, "rollout/truncated_ratio": 0.05}
                                      for i in range(20)]),
    ran("run: RLOO with two samples", "", {"advantage_estimator": "rloo", "n_samples_per_prompt": 2}),
)  # fmt: skip

CASES: tuple[Case, ...] = (*FAULTS, *HEALTHY)
