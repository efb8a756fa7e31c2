"""Functions that the ranks of Megatron-LM checkpoint tests run: conversion, and reading Megatron-core checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from backends import megatron_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.errors import CheckpointError
from furlong.models import hf_model as hf
from furlong.models.hf_config import load_config
from furlong.models.stored_tensors import open_tensors
from furlong.training.megatron_lm.dist_files import DistReader
from furlong.training.ranks import Ranks
from megatron_cases import OPTIM, steps_of, take_step
from ranks_cases import SETTINGS, weights

from megatron.core import parallel_state  # isort: skip  after `megatron_cases` has prepared it

from furlong.training.megatron import megatron_compat as compat
from furlong.training.megatron.megatron_backend import fill
from furlong.training.megatron.parallel_layout import Layout

for _name in ("filesystem_async", "fully_parallel", "state_dict_saver", "torch"):
    importlib.import_module(f"megatron.core.dist_checkpointing.strategies.{_name}")
compat.prepare()  # of these, too


def converted(ranks: Ranks, folder: Path, *, family: str, dtype: str = "") -> dict[str, Any]:
    """Convert a Hugging Face folder to Megatron-LM, twice, and back.

    dtype: dtype of the tensors in all folders, except expert biases.
    """
    from furlong.cli import main

    exact: dict[str, Tensor] = {}
    if dtype:
        model = hf.load_model(folder / family)
        exact = {name: own.clone() for name, own in model.named_buffers() if name.endswith("correction_bias")}
        model.to(getattr(torch, dtype))
        for name, own in exact.items():
            model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = own
        family = f"{family}-{dtype}"
        hf.save_model(model, folder / family)
    source, core, back = folder / family, folder / f"{family}-core", folder / f"{family}-back"
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        words = ["convert", "hf-to-megatron", "--hf_model_path", str(source), "--save_path", str(core)]
        words += ["--dtype", dtype] if exact else []
        codes = [main(words), main(words)]
        codes.append(main(["convert", "megatron-to-hf", str(core), str(back), "--hf-checkpoint", str(source)]))
    files = [load_file(path / "model.safetensors") for path in (source, back)]
    is_same = files[0].keys() == files[1].keys()
    is_same = is_same and all(files[1][n].dtype == t.dtype and torch.equal(files[1][n], t) for n, t in files[0].items())
    return {"codes": codes, "output": output.getvalue(), "is_same": is_same, "rank": ranks.rank}


def exchanged(ranks: Ranks, folder: Path, *, family: str) -> dict[str, Any]:
    """Return whether Megatron-core and furlong load a converted checkpoint on two tensor-parallel ranks."""
    from megatron.core import dist_checkpointing

    layout, stored = Layout(tensor=2, sequence_parallel=True), folder / f"{family}-core" / "release"
    trained = megatron_backend(folder / family, ranks, optim=OPTIM, layout=layout)
    (chunk,) = trained.actor
    expected = {name: tensor.clone() for name, tensor in chunk.named_parameters()}

    def is_back() -> bool:
        same = [torch.equal(expected[name], tensor) for name, tensor in chunk.named_parameters()]
        with torch.no_grad():
            for tensor in chunk.parameters():
                tensor.zero_()
        return all(same)

    assert is_back()
    chunk.load_state_dict(dist_checkpointing.load({"model": chunk.sharded_state_dict()}, str(stored))["model"])
    by_core = is_back()
    fill([chunk], stored, trained.hf)
    return {"by_core": by_core, "here": is_back()}


FORMS = ("fully_reshardable", "dp_reshardable")


def saved_by_core(ranks: Ranks, folder: Path, *, models: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Save weights and optimizer after one step as Megatron-LM does, in both formats; then take the second step.

    models: layout and dtype by family.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron-core would start the manager in a new interpreter.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    seen: dict[str, Any] = {}
    for family, options in models.items():
        sizes = dict(options)
        dtype = getattr(torch, sizes.pop("dtype", "float32"))
        layout = Layout(ranks.tensor, ranks.pipeline, ranks.context, **sizes)
        how: dict[str, Any] = {"optim": OPTIM, "layout": layout, "temperature": 0.9, "dtype": dtype}
        trained = megatron_backend(folder / family, ranks, **how)
        for number, (part, rows) in enumerate(steps_of(ranks)):
            results: dict[str, Any] = {"losses": [], "norms": [], "log_probs": []}
            take_step(trained, part, rows, PolicyLoss(SETTINGS), results)
            if number == 0:
                for form in FORMS:
                    _save_as_megatron_lm(trained, folder / f"{family}-{name}-{form}" / "iter_0000005", form, ranks)
                trained.save_hf(folder / f"{family}-{name}-trained")
        seen[family] = results | {"weights": weights(trained)}
        parallel_state.destroy_model_parallel()  # a process has one layout at a time
    return seen


def _save_as_megatron_lm(trained: Any, target: Path, form: str, ranks: Ranks) -> None:
    from megatron.core import dist_checkpointing

    chunks = trained.actor
    content = {
        "distrib_optim_sharding_type": form,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    parts = [chunk.sharded_state_dict(metadata=content) for chunk in chunks]
    model = {"model": parts[0]} if len(parts) == 1 else {f"model{number}": part for number, part in enumerate(parts)}
    states = {"torch_rng_state": torch.get_rng_state(), "random_rng_state": random.getstate()}
    layout = trained.layout
    args = argparse.Namespace(
        num_layers=trained.hf.num_hidden_layers,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
    )
    rng = dist_checkpointing.mapping.ShardedObject("rng_state", [states], (ranks.world_size,), (ranks.rank,))
    state = {
        "args": args,
        "iteration": 5,
        **model,
        "optimizer": trained.optimizer.optimizer.sharded_state_dict(model, metadata=content),
        "rng_state": rng,
    }
    target.mkdir(parents=True, exist_ok=True)
    ranks.wait()
    dist_checkpointing.save(state, str(target), content_metadata=content)


def read_from_core(ranks: Ranks, folder: Path, *, family: str) -> dict[str, Any]:
    """Check and convert a checkpoint of `saved_by_core` with furlong's commands."""
    from furlong.cli import main

    stored, back, trained = (
        folder / f"{family}-{kind}" for kind in (f"tensor-{FORMS[1]}", "from-core", "tensor-trained")
    )
    (stored / "latest_checkpointed_iteration.txt").write_text("5")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        codes = [main(["check", str(stored), "--hf-checkpoint", str(trained)])]
        codes.append(main(["convert", "megatron-to-hf", str(stored), str(back), "--hf-checkpoint", str(trained)]))
    with open_tensors(trained) as expected, open_tensors(back) as results:
        is_same = expected.names == results.names
        is_same = is_same and all(torch.equal(expected.read(name), results.read(name)) for name in expected.names)
    return {"codes": codes, "output": output.getvalue(), "is_same": is_same, "rank": ranks.rank}


def refused_buffers(ranks: Ranks, folder: Path, *, family: str) -> str:
    """Return the error for optimizer states that Megatron-core saved in flat buffers."""
    stored = folder / f"{family}-tensor-dp_reshardable" / "iter_0000005"
    try:
        megatron_backend(folder / family, ranks, optim=OPTIM, initial_weights=stored, initial_optimizer=stored)
    except CheckpointError as error:
        return str(error)
    return ""


def damaged_for_one(ranks: Ranks, folder: Path, *, family: str) -> dict[str, str]:
    """Return the error of each rank for folders that only the last rank cannot read, as with local disks."""
    errors: dict[str, str] = {}
    sizes = {"optim": OPTIM, "layout": Layout(ranks.tensor, ranks.pipeline)}
    stored = folder / f"{family}-tensor-fully_reshardable" / "iter_0000005"
    for fault, word in {"weights": "decoder", "moments": "exp_avg", "common": ""}.items():
        local = stored
        if ranks.rank == ranks.world_size - 1:
            shutil.copytree(stored, local := folder / f"damaged-{fault}")
            _damage(local, word)
        start = {"initial_weights": local if fault == "weights" else stored, "initial_optimizer": local}
        try:
            megatron_backend(folder / family, ranks, **sizes, **start)
        except CheckpointError as error:
            errors[fault] = str(error)
        parallel_state.destroy_model_parallel()
    return errors


def _damage(folder: Path, word: str) -> None:
    """Overwrite the chunks of all tensors with `word` in their names, or common.pt if `word` is empty."""
    if not word:
        (folder / "common.pt").write_bytes(b"cut off")
        return
    files = DistReader(folder)
    for name in files.names:
        for info in (info for key, info in files._storage.items() if key.fqn == name and word in name):
            with (folder / info.relative_path).open("r+b") as file:
                file.seek(info.offset)
                file.write(b"x" * info.length)


def without_padding(ranks: Ranks, folder: Path, *, family: str) -> list[bool]:
    """Return whether models with and without vocabulary padding load the same states from a padded checkpoint."""
    config = load_config(folder / family)
    config.vocab_size -= 2
    hf.save_model(hf.build_model(config, seed=0), folder / f"{family}-less")
    stored = folder / f"{family}-tensor-fully_reshardable" / "iter_0000005"
    states: list[list[Tensor]] = []
    for name in (family, f"{family}-less"):
        trained = megatron_backend(folder / name, ranks, optim=OPTIM, initial_weights=stored, initial_optimizer=stored)
        parameters = list(trained.actor[0].parameters())
        kinds = ("master", "exp_avg", "exp_avg_sq")
        states.append([trained.optimizer.state.whole(parameter, kind) for parameter in parameters for kind in kinds])
        parallel_state.destroy_model_parallel()
    assert len(states[1][0]) == config.vocab_size
    return [torch.equal(padded[: len(cut)], cut) and bool(cut.any()) for padded, cut in zip(*states, strict=True)]
