"""`furlong convert`: convert weights between Hugging Face and Megatron-LM formats."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from furlong.commands import check
from furlong.commands.check import conversion
from furlong.commands.output import show, show_findings
from furlong.core.checkpoint_folder import TRACKER, find_checkpoint
from furlong.core.files import atomic_folder, write_atomically
from furlong.errors import CheckpointError, ConfigError
from furlong.tools.memory_plan import size_text
from furlong.tools.weight_values import check_weights
from furlong.training.checkpoint.dist_files import is_dist_folder

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "fp32": "float32", "bf16": "bfloat16"}
FORMS = """usage: furlong convert hf-to-megatron SOURCE TARGET ...
       furlong convert megatron-to-hf SOURCE TARGET --hf-checkpoint DIR ...
       furlong convert check DIR ...

hf-to-megatron writes a Megatron-LM checkpoint (torch_dist), which any parallel
layout can load, from a Hugging Face model or a furlong checkpoint.
megatron-to-hf writes a Hugging Face model from a Megatron-LM checkpoint or a
furlong checkpoint. Conversion runs in one process on the CPU, one parameter at
a time; the result is read back and compared.
check is the same as `furlong check`.
`furlong convert hf-to-megatron --help` lists the options."""
LAYOUT_FLAGS = ("tensor", "pipeline", "expert", "context")


def main(words: list[str]) -> int:
    """Convert or check weights; exit code 1 if a check fails."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "hf-to-megatron": hf_to_megatron,
        "megatron-to-hf": megatron_to_hf,
        "check": check.main,
    }
    if not words or words[0] in ("-h", "--help"):
        show(FORMS)
        return 0 if words else 2
    if words[0] not in commands:
        raise ConfigError(f"furlong convert {words[0]}: expected one of {', '.join(commands)}")
    return commands[words[0]](words[1:])


def hf_to_megatron(words: Sequence[str]) -> int:
    """Write a Megatron-LM checkpoint (torch_dist) from a Hugging Face model or a furlong checkpoint."""
    parser = _parser("furlong convert hf-to-megatron", hf_to_megatron.__doc__)
    parser.add_argument(
        "source", metavar="SOURCE", nargs="?", type=Path, help="Hugging Face model, or a --save directory"
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", type=Path, help="directory to write")
    _both(
        parser, "--hf-checkpoint", "--hf-model-path", what="Hugging Face model; needed if SOURCE is a --save directory"
    )
    _both(parser, "--save", "--save-path", what="TARGET")
    parser.add_argument("--iteration", type=int, metavar="N", help="write iter_N instead of release")
    for name in LAYOUT_FLAGS:
        known = f"--{name}-{'' if name == 'context' else 'model-'}parallel-size"
        parser.add_argument(known, type=int, metavar="N", help="no effect: any parallel layout can load the result")
    options = parser.parse_args(words)
    given, target = options.source or options.hf_checkpoint, options.target or options.save
    if given is None or target is None:
        raise ConfigError("furlong convert hf-to-megatron needs a SOURCE and a TARGET (or --hf-checkpoint and --save)")
    source, config = _source(given, options.step), Path(options.hf_checkpoint or given)
    _need_config(config)
    name = "release" if options.iteration is None else f"iter_{options.iteration:07d}"
    final = target / name
    _free(final, options.force)
    convert, dtype = conversion(), _dtype(options.dtype)
    with atomic_folder(final) as partial, convert.open_weights(source, config) as weights:
        num_bytes = convert.write_dist(weights, partial, dtype=dtype, iteration=options.iteration or 0)
        with convert.open_weights(partial, config) as written:
            count = convert.check_same(weights, written, dtype=dtype)
    write_atomically(target / TRACKER, "release" if options.iteration is None else f"{options.iteration}\n")
    show(f"{final}: {count} tensors, {size_text(num_bytes)}, read back and equal")
    if source == config:
        _forward(options.forward, convert, final, config, num_bytes)
    return 0


def megatron_to_hf(words: Sequence[str]) -> int:
    """Write a Hugging Face model from a Megatron-LM checkpoint (torch_dist) or a furlong checkpoint."""
    parser = _parser("furlong convert megatron-to-hf", megatron_to_hf.__doc__)
    parser.add_argument(
        "source", metavar="SOURCE", nargs="?", type=Path, help="directory of checkpoints, or one of them"
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", type=Path, help="directory to write")
    _both(parser, "--input-dir", "--load", what="SOURCE")
    _both(parser, "--output-dir", "--save", what="TARGET")
    what = "Hugging Face model whose config.json, tokenizer and other files are copied"
    _both(parser, "--hf-checkpoint", "--origin-hf-dir", what=what)
    options = parser.parse_args(words)
    given, target, config = options.source or options.input_dir, options.target or options.output_dir, None
    if given is None or target is None or options.hf_checkpoint is None:
        raise ConfigError("furlong convert megatron-to-hf needs a SOURCE, a TARGET and --hf-checkpoint")
    config = Path(options.hf_checkpoint)
    _need_config(config)
    source = _source(given, options.step)
    _free(target, options.force)
    convert, dtype = conversion(), _dtype(options.dtype)
    with atomic_folder(target) as partial, convert.open_weights(source, config) as weights:
        num_bytes = convert.write_hf(weights, partial, dtype=dtype, companions=config)
        with convert.open_weights(partial, partial) as written:
            count = convert.check_same(weights, written, dtype=dtype)
        found = check_weights(partial)
        if any(each.severity == "error" for each in found):
            show_findings(found, well="")
            raise CheckpointError(f"the model converted from {source} is incomplete; check SOURCE with `furlong check`")
    show(f"{target}: {count} tensors, {size_text(num_bytes)}, read back and equal; files and layers are complete")
    _forward(options.forward, convert, source, target, num_bytes)
    return 0


def _parser(name: str, what: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False, description=what)
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="data type to write (default: as stored)")
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint in SOURCE (default: newest)")
    parser.add_argument("--force", "-f", action="store_true", help="replace an existing TARGET")
    parser.add_argument(
        "--forward",
        choices=("auto", "on", "off"),
        default="auto",
        help="run both models on the same tokens and compare logits; auto: if both fit into half of the free memory",
    )
    return parser


def _both(parser: argparse.ArgumentParser, name: str, other: str, *, what: str) -> None:
    """Add an option with furlong's and slime's name, each with hyphens and with underscores."""
    spelled = dict.fromkeys(form for each in (name, other) for form in (each, f"--{each[2:].replace('-', '_')}"))
    parser.add_argument(*spelled, dest=name[2:].replace("-", "_"), type=Path, metavar="DIR", help=what)


def _need_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; give the model's Hugging Face folder with --hf-checkpoint")


def _source(folder: Path, step: int | None) -> Path:
    """Return the directory with weights: `folder` itself, or a checkpoint in it."""
    if (folder / "config.json").is_file() or is_dist_folder(folder) or (folder / "trainer.json").is_file():
        return folder
    if (folder / "trainer").is_dir():
        return folder / "trainer"
    newest = (folder / TRACKER).read_text().strip() if (folder / TRACKER).is_file() else ""
    name = f"iter_{step:07d}" if step is not None else newest if newest == "release" else f"iter_{newest:0>7}"
    if is_dist_folder(folder / name):
        return folder / name
    found = find_checkpoint(folder, step=step, save_dir=None, flag="checkpoint")
    assert found is not None  # without save_dir, a missing checkpoint is an error
    return found / "trainer"


def _free(target: Path, is_forced: bool) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not is_forced:
        raise ConfigError(f"{target} already exists; choose another directory, or replace it with --force")


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, DTYPES[name])


def _forward(wanted: str, convert: Any, source: Path, hf_folder: Path, num_bytes: int) -> None:
    """Compare the logits of both models if asked to, or if both fit into half of the free memory."""
    needed, free = 4 * num_bytes, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted == "off" or (wanted == "auto" and needed > free / 2):
        show(
            f"logits not compared: needs about {size_text(needed)} of {size_text(free)} free memory; "
            "compare with --forward on"
        )
        return
    with convert.open_weights(source, hf_folder) as weights:
        worst = convert.check_forward(weights, hf_folder)
    show(f"largest difference of the logits of both models: {worst:.1e}")
