"""Commands that a run refuses, pairs of faults, and messages of user code that look like a row's."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from diagnosis_score import Case, Flags, case, doctor, log
from faults.world import World
from furlong.catalogue import Diagnosis
from furlong.cli import main, main_train
from furlong.diagnosis.postmortem.run_examination import explain
from furlong.errors import HookError
from furlong.files.file_tensors import save_verified
from furlong.files.model_manifest import MODEL_MANIFEST, write_model_manifest
from furlong.quickstart.quickstart import model_folder
from furlong.tools.weight_values import check_weights
from runs import flags, write_prompts

Change = Callable[[World], Flags | None]
WEIGHTS = "model.safetensors"
KL: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3"}
DEEP = '{"a":' * 3000 + "1" + "}" * 3000


@functools.cache
def _recorded() -> tempfile.TemporaryDirectory[str]:
    """A run of two rollouts with checkpoints and dumps."""
    folder = tempfile.TemporaryDirectory(prefix="furlong-recorded-")
    path = Path(folder.name)
    write_prompts(path / "prompts.jsonl", 24)
    dumps = path / "dump_{rollout_id}.safetensors"
    saved = {"save": path / "save", "save_interval": 1, "save_debug_rollout_data": dumps, "lr": 1e-4}
    assert main_train(flags(model_folder(), path / "prompts.jsonl", path / "run", rm_type="math", **saved)) == 0
    return folder


def recorded_run() -> Path:
    """The folder of that run."""
    return Path(_recorded().name) / "run"


def _resumed(change: Change | None = None, **more: Any) -> Change:
    def prepare(world: World) -> dict[str, Any]:
        shutil.copytree(Path(_recorded().name) / "save", world.folder / "save")
        asked = {"load": world.folder / "save", "num_rollout": 4} | more
        return asked | dict((change(world) if change is not None else None) or {})

    return prepare


def _replayed(change: Change | None = None, **more: Any) -> Change:
    def prepare(world: World) -> dict[str, Any]:
        for path in Path(_recorded().name).glob("dump_*"):
            shutil.copyfile(path, world.folder / path.name)
        asked = {"load_debug_rollout_data": world.folder / "dump_{rollout_id}.safetensors"} | more
        return asked | dict((change(world) if change is not None else None) or {})

    return prepare


def _config(**changes: Any) -> Change:
    def prepare(world: World) -> None:
        path = world.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return prepare


def _file(flag: str, name: str, text: str, **more: Any) -> Change:
    def prepare(world: World) -> dict[str, Any]:
        (world.folder / name).write_text(text)
        return {flag: world.folder / name} | more

    return prepare


def _labels(world: World) -> None:
    rows = [json.loads(line) for line in world.data.read_text().splitlines()]
    world.write(*(row | ({"label": "77"} if number in (5, 6) else {}) for number, row in enumerate(rows)))


def _flipped(name: str) -> Change:
    def prepare(world: World) -> None:
        path = world.folder / "save" / "iter_0000002" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return prepare


def _written(change: Callable[[Path], object], flag: str = "hf_checkpoint") -> Change:
    """The model of a flag is a folder that furlong wrote, and was changed afterwards."""

    def prepare(world: World) -> dict[str, Any]:
        folder = shutil.copytree(model_folder(), world.folder / "written")
        save_verified(folder / WEIGHTS, load_file(folder / WEIGHTS), {"format": "pt"})
        write_model_manifest(folder)
        change(folder)
        return {flag: folder}

    return prepare


def _swapped(name: str, old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def _bit(name: str, share: float) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(len(content) * share)] ^= 1
        (folder / name).write_bytes(content)

    return change


def _other_weights(folder: Path) -> None:
    """Weights of another training run, which furlong wrote, too."""
    save_verified(folder / WEIGHTS, {n: t + 1 for n, t in load_file(folder / WEIGHTS).items()}, {"format": "pt"})


def _accepted(world: World) -> None:
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        assert main(["check", str(world.folder / "written"), "--accept-changes"]) == 0


def _checked(change: Callable[[Path], object]) -> Callable[[Path], Iterable[Diagnosis]]:
    """What `furlong check` says about such a folder."""

    def diagnose(folder: Path) -> Iterable[Diagnosis]:
        _written(change)(World(folder, folder, folder))
        return check_weights(folder / "written", with_values=True)

    return diagnose


def _pickled(world: World) -> None:
    (world.folder / "dump_1.safetensors").write_bytes(b"PK\x03\x04 archive/data.pkl")


COMMANDS = (
    doctor("epochs of a stream", "CFG05", {"num_epoch": 1, "streaming_data": True, "num_rollout": None},
           remedy="--num-rollout"),
    doctor("warm-up twice", "CFG05", {"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, remedy="one"),
    doctor("a warm-up longer than the decay", "CFG05", {"lr_warmup_iters": 10, "lr_decay_iters": 5},
           remedy="--lr-"),
    doctor("every parameter frozen", "CFG05", {"freeze_params_name_list": [".*"]}, remedy="--freeze-params-name-list"),
    doctor("an expression that does not compile", "CFG05", {"freeze_params_name_list": ["(["]}),
    doctor("a list that matches no parameter", "CFG05", {"only_train_params_name_list": ["vision"]},
           remedy="model.embed_tokens.weight", fixed=lambda _: {"only_train_params_name_list": ["embed_tokens"]}),
    doctor("float16", "CFG02", {"fp16": True}, remedy="--bf16"),
    doctor("CP that does not divide", "CFG05", {"context_parallel_size": 3}, also="CFG05"),
    doctor("TP without Megatron", "CFG02", {"tensor_model_parallel_size": 2}, remedy="--train-backend megatron"),
    doctor("offload without shared GPUs", "CFG02", {"offload": True, "debug_rollout_only": True}, remedy="remove"),
    doctor("an optimizer's offload on a CPU", "CFG02", {"offload_optimizer_states": True}, remedy="remove"),
    doctor("a transport for servers", "CFG05", {"update_weight_transport": "disk"}, remedy="--rollout-num-gpus"),
    doctor("no engine configuration", "CFG05", {"sglang_config": "nowhere/no.yaml"}, remedy="existing file"),
    doctor("prefill servers without engines", "CFG02", {"prefill_num_servers": 1}, remedy="--rollout-num-gpus"),
    doctor("no evaluation file", "CFG05", {"eval_config": "nowhere/no.yaml", "eval_interval": 1}),
    doctor("one name for two evaluation sets", "CFG05",
           None, lambda world: {"eval_prompt_data": ["a", world.data, "a", world.data], "eval_interval": 1}),
    doctor("the last rows of a stream", "CFG05", {"streaming_data": True, "rollout_batch_size": 2},
           lambda world: {"prompt_data": f"{world.data}@[-3:]"}, remedy="--streaming-data",
           fixed=lambda _: {"streaming_data": None}),
    doctor("a slice without rows", "DATA02", None, lambda world: {"prompt_data": f"{world.data}@[100:]"}),
    doctor("a slice that is none", "CFG05", None, lambda world: {"prompt_data": f"{world.data}@[a:]"}),
    doctor("a Ray client's address", "GPU05",
           {"ray_address": "ray://127.0.0.1:1", "actor_num_gpus_per_node": 2, "rollout_num_gpus": 1},
           remedy="ray job submit"),
    doctor("an address without a port", "ENG05", {"rollout_external_engine_addrs": ["nohost"]}),
    doctor("a verifier without labels", "REW01", {"rm_type": "dapo", "label_key": None}, remedy="--label-key",
           fixed={"label_key": "label"}),
    doctor("a reward that is none", "CFG05", {"rm_type": "mathh"}, remedy="math", fixed=lambda _: {"rm_type": "math"}),
    doctor("no reward", "CFG05", {"rm_type": None}, remedy="--rm-type", also="CFG05"),
    doctor("a negative stop id", "CFG05", {"rollout_stop_token_ids": [-1]}),
    doctor("a temperature of 0", "CFG05", {"rollout_temperature": 0}),
    doctor("a context beyond the model", "CFG05", {"rollout_max_context_len": 99_999},
           fixed=lambda _: {"rollout_max_context_len": 4096}),
    doctor("a context without room", "CFG05", {"rollout_max_context_len": 4}, remedy="raise the context"),
    doctor("several samples of a demonstration", "CFG05", {"loss_type": "sft_loss", "rm_type": None},
           also="CFG02 TPL01", fixed=lambda _: {"n_samples_per_prompt": 1}),
    doctor("a deep JSON flag", "CFG05", {"apply_chat_template": True, "apply_chat_template_kwargs": DEEP}),
    doctor("a deep config.json", "CKPT07", None,
           lambda world: (world.model / "config.json").write_text(DEEP) and None),
    doctor("an end that is a word", "CFG05 STOP01 CKPT07", None,
           lambda world: (world.model / "generation_config.json").write_text('{"eos_token_id": "x"}') and None,
           remedy="correct the file"),
    doctor("layers in words", "CKPT07", None, _config(num_hidden_layers="5"), also="CKPT04"),
    doctor("fewer heads than stored", "CKPT04", None, _config(num_attention_heads=3), remedy="config.json"),
    doctor("an activation that is unknown", "CKPT07", None, _config(hidden_act="nope")),
    doctor("an untied head that is not stored", "CKPT04", None, _config(tie_word_embeddings=False)),
    doctor("FP8 weights", "QNT03", None, _config(quantization_config={"quant_method": "fp8"}), also="CFG05"),
    doctor("another start than the checkpoint's", "CKPT01", None, _resumed(start_rollout_id=1), remedy="remove it",
           also="CKPT06", fixed=lambda _: {"start_rollout_id": None}),
    doctor("another optimizer than the checkpoint's", "CKPT01", None, _resumed(optimizer="sgd"), also="CKPT06",
           remedy="--no-load-optim", fixed={"no_load_optim": True}),
    doctor("fewer trained parameters than saved", "CKPT01", None, _resumed(freeze_params_name_list=["embed"]),
           also="CKPT06", remedy="lists of the run that saved it", fixed=lambda _: {"freeze_params_name_list": None}),
    doctor("another seed than the checkpoint's", "CKPT01", None, _resumed(rollout_seed=7), also="CKPT06",
           fixed=lambda _: {"rollout_seed": None}),
    doctor("labels that changed since", "CKPT01", None, _resumed(_labels), also="CKPT06"),
    doctor("a changed position", "CKPT01", None, _resumed(_flipped("state.json")), remedy="--ckpt-step 1",
           fixed={"ckpt_step": 1}),
    doctor("a changed manifest", "CKPT01", None, _resumed(_flipped("manifest.json")), remedy="--ckpt-step 1",
           fixed={"ckpt_step": 1}),
    doctor("another model's checkpoint", "CKPT01 CKPT04", None, _resumed(_config(intermediate_size=200)),
           also="CKPT06 CKPT04 CKPT01"),
    doctor("a share of a dump", "CFG01", None,
           _replayed(load_debug_rollout_data_subsample=0.3, global_batch_size=16), remedy="--global-batch-size",
           fixed={"global_batch_size": 4}),
    doctor("more rollouts than dumps", "CFG05", None, _replayed(num_rollout=5), remedy="--num-rollout 2",
           fixed={"num_rollout": 2}),
    doctor("a pickle among the dumps", "DATA01", None, _replayed(_pickled)),
)  # fmt: skip


_ACCEPT = "Restore them|--accept-changes"
CHANGED = (
    doctor("the base of RoPE in a written config.json", "CKPT07", None,
           _written(_swapped("config.json", '"rope_theta": 10000', '"rope_theta": 20000')),
           remedy=_ACCEPT, fixed=_accepted),
    doctor("a word of a written template", "CKPT07", None,
           _written(_swapped("chat_template.jinja", "assistant", "helper")), remedy=_ACCEPT, fixed=_accepted),
    doctor("a bit of a written tokenizer", "CKPT07", None, _written(_bit("tokenizer.json", 0.7)), remedy=_ACCEPT),
    doctor("a line's end in a written tokenizer's settings", "CKPT07", None,
           _written(_swapped("tokenizer_config.json", "{", "{\n")), remedy=_ACCEPT, fixed=_accepted),
    doctor("other generation settings of a written model", "CKPT07", None,
           _written(lambda folder: (folder / "generation_config.json").write_text("{}")), remedy=_ACCEPT),
    doctor("a written model without its template", "CKPT07", None,
           _written(lambda folder: (folder / "chat_template.jinja").unlink()), remedy=_ACCEPT),
    doctor("weights of another run in a written folder", "CKPT07", None, _written(_other_weights), remedy=_ACCEPT,
           fixed=_accepted),
    doctor("a bit in the header of written weights", "CKPT07", None, _written(_bit(WEIGHTS, 0.0001)), remedy=_ACCEPT),
    doctor("written weights that are cut off", "CKPT07", None,
           _written(lambda folder: os.truncate(folder / WEIGHTS, 5000)), remedy=_ACCEPT),
    doctor("a bit of a written model's manifest", "CKPT07", None, _written(_bit(MODEL_MANIFEST, 0.5)), remedy=_ACCEPT),
    doctor("a changed model of the reference", "CKPT07", KL,
           _written(_bit("config.json", 0.5), "ref_load"), remedy=_ACCEPT),
    case("a bit of a written tensor", "CKPT04", _checked(_bit(WEIGHTS, 0.6)), remedy="intact copy"),
    case("the last bit of the written weights", "CKPT04", _checked(_bit(WEIGHTS, 0.9999)), remedy="intact copy"),
    case("a bit of a checked tokenizer", "CKPT04", _checked(_bit("tokenizer.json", 0.2)), remedy=_ACCEPT),
)  # fmt: skip


def _both(*changes: Change) -> Change:
    """Several faults in one command."""

    def prepare(world: World) -> dict[str, Any]:
        return {flag: value for change in changes for flag, value in dict(change(world) or {}).items()}

    return prepare


def _cut(world: World) -> None:
    path = world.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _without_label(world: World) -> None:
    world.write(*({"input": str(i), "label" if i < 10 else "x": "1"} for i in range(20)))


_ONE = {
    "CFG01": lambda _: {"global_batch_size": 7},
    "CKPT04": _cut,
    "DATA01": _without_label,
    "ENV02": lambda _: {"num_threads": 999},
    "CFG02": lambda _: {"kl_los_coef": 0.1},
    "DISK01": lambda world: {"save": world.data / "save"},
    "STOP01": lambda _: {"rollout_stop_token_ids": [99_999]},
}  # fmt: skip
PAIRS = tuple(
    doctor(f"beside {second}", first, None, _both(_ONE[first], _ONE[second]), also=second)
    for first in _ONE
    for second in _ONE
    if first != second
)

# What a user's function raised or printed, as the log or the error of a run has it: none of it is the engine's.
MESSAGES = {
    "a judge that is out of memory": "judge said: CUDA out of memory",
    "a judge whose NCCL timed out": "NCCL timeout at the judge's server",
    "a tool that hangs": "engine 3 hangs, giving up",
    "a server that died": "engine 0 at http://10.0.0.1:1: process 7 was ended by signal 9",
    "a refused connection": "Max retries exceeded with url: /generate (Connection refused)",
    "an illegal access of a sandbox": "sandbox: an illegal memory access was encountered",
    "a crash of a worker": "WorkerCrashedError in the grader's own Ray",
}


def _of_user(message: str) -> Callable[[Path], Any]:
    def diagnose(folder: Path) -> Any:
        (folder / "events.jsonl").touch()
        error = HookError(f"--custom-generate-function-path own.py:generate raised RuntimeError: {message}\n  own.py:3")
        return explain(error, folder, {"custom_generate_function_path": "own.py:generate"})[0]

    return diagnose


def _printed(message: str) -> Case:
    """The same words in what a user's function printed before the disk was full."""
    text = f"12:00:01 I own: {message}\nOSError: [Errno 28] No space left on device: '/ckpt/w'\n"
    return log(f"a full disk after the words: {message[:30]}", "DISK01", text, {"engine": "sglang"})


USERS = (
    *(case(name, "HOOK01", _of_user(message), without="--sglang-mem-fraction-static|--use-fault-tolerance")
      for name, message in MESSAGES.items()),
    *(_printed(message) for message in MESSAGES.values()),
)  # fmt: skip

HEALTHY = (
    doctor("a written folder", "", None, _written(lambda _: None)),
    doctor("a card beside a written model", "", None,
           _written(lambda folder: (folder / "README.md").write_text("# A model"))),
)  # fmt: skip

CASES: tuple[Case, ...] = (*COMMANDS, *CHANGED, *PAIRS, *USERS)
