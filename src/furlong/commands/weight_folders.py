"""Commands on directories of weights: `furlong check`, and `furlong convert` between formats and precisions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.commands.output import Report, command_parser, show, show_findings
from furlong.config.hub import resolve_model
from furlong.diagnosis.saved_files import check_saved
from furlong.errors import CheckpointError, ConfigError
from furlong.files.atomic import atomic_folder, write_atomically
from furlong.files.checkpoint_folder import TRACKER, find_checkpoint, tracker_text
from furlong.tools.memory_plan import size_text
from furlong.tools.model_folder import check_model
from furlong.tools.weight_values import check_weights

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "fp32": "float32", "bf16": "bfloat16"}
FORMS = """usage: furlong convert hf-to-megatron SOURCE TARGET ...
       furlong convert megatron-to-hf SOURCE TARGET --hf-checkpoint DIR ...
       furlong convert hf-to-fp8 SOURCE TARGET [--calibrate TEXT] ...
       furlong convert hf-to-int4 SOURCE TARGET [--calibrate TEXT] ...
       furlong convert dequantize SOURCE TARGET
       furlong convert check DIR ...

hf-to-megatron writes a Megatron-LM checkpoint (torch_dist), which any parallel
layout can load, from a Hugging Face model or a furlong checkpoint.
megatron-to-hf writes a Hugging Face model from a Megatron-LM checkpoint or a
furlong checkpoint. Conversion runs in one process on the CPU, one parameter at
a time; the result is read back and compared.
hf-to-fp8 and hf-to-int4 quantize the weights of a Hugging Face model, file by
file, for engines; dequantize makes them whole again.
check is the same as `furlong check`.
`furlong convert hf-to-megatron --help` lists the options."""
# What slime's converter to INT4 leaves unquantized: all but routed experts.
ALL_BUT_EXPERTS = (
    r"re:.*lm_head.*",
    r"re:.*norm.*",
    r"re:.*embed.*",
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*mlp\.gate\.*",
)
LAYOUT_FLAGS = ("tensor", "pipeline", "expert", "context")


def check(words: list[str]) -> int:
    """Check a model, a --save directory, a Megatron-LM checkpoint, a run's directory, dumps of rollouts or a bundle.

    Exit code 1 on a problem.
    """
    parser = command_parser("check", check.__doc__)
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        help="model, --save directory or one iter_* of it, run directory, directory of dumps; or a dump or bundle",
    )
    parser.add_argument("--headers-only", action="store_true", help="do not read tensor values")
    parser.add_argument(
        "--hf-checkpoint", metavar="DIR", type=Path, help="also check that a Megatron-LM checkpoint matches this model"
    )
    options = parser.parse_args(words)
    options.folder = Path(resolve_model("DIR", str(options.folder)))
    if options.hf_checkpoint is not None:
        options.hf_checkpoint = Path(resolve_model("--hf-checkpoint", str(options.hf_checkpoint)))
    records = check_saved(options.folder)
    if records is not None and options.hf_checkpoint is not None:
        raise ConfigError(f"--hf-checkpoint has no effect: {options.folder} has no weights; remove it")
    findings = records
    if findings is None:
        findings = _findings(options.folder, options.hf_checkpoint, with_values=not options.headers_only)
    what = "files and layers" if options.headers_only else "files, layers and values"
    well = "all files are intact" if records is not None else f"{what} are complete"
    report = Report(as_json=options.json)
    report.findings(findings, well=f"{options.folder}: {well}")
    return report.end(folder=str(options.folder))


def _findings(folder: Path, model: Path | None, *, with_values: bool) -> list[Diagnosis]:
    from furlong.tools.dist_checkpoint import check_dist, dist_folder

    dist = dist_folder(folder)
    if dist is None:
        if model is not None:
            raise ConfigError(f"--hf-checkpoint has no effect: {folder} is not a Megatron-LM checkpoint; remove it")
        findings = check_weights(folder, with_values=with_values)
        is_model = (folder / "config.json").is_file() and not any(each.severity == "error" for each in findings)
        return [*findings, *_loading(folder)] if is_model else findings
    findings = check_dist(dist, with_values=with_values)
    if model is None or any(finding.severity == "error" for finding in findings):
        return findings
    try:
        with _conversion().open_weights(dist, model):
            return findings
    except CheckpointError as error:
        remedy = "give the Hugging Face model that was saved"
        return [*findings, diagnosis("CKPT04", str(error), cause="The two are different models.", remedy=remedy)]


def _loading(folder: Path) -> list[Diagnosis]:
    from furlong.diagnosis.preflight.weight_checks import folder_findings

    try:
        return folder_findings(folder)
    except ConfigError as error:  # a quantization that furlong does not read: the files may still be complete
        problem, _, remedy = str(error).rpartition("; ")
        return [diagnosis("QNT03", problem or str(error), remedy=remedy, severity="warning")]


def _conversion() -> Any:
    from furlong.training.megatron import megatron_compat as compat

    compat.prepare()
    from furlong.training.megatron_lm import convert_weights

    return convert_weights


def convert(words: list[str]) -> int:
    """Convert or check weights; exit code 1 if a check fails."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "hf-to-megatron": hf_to_megatron,
        "megatron-to-hf": megatron_to_hf,
        "hf-to-fp8": hf_to_fp8,
        "hf-to-int4": hf_to_int4,
        "dequantize": dequantize,
        "check": check,
    }
    if not words or words[0] in ("-h", "--help"):
        show(FORMS)
        return 0 if words else 2
    if words[0] not in commands:
        raise ConfigError(f"furlong convert {words[0]}: expected one of {', '.join(commands)}")
    return commands[words[0]](words[1:])


def hf_to_megatron(words: Sequence[str]) -> int:
    """Write a Megatron-LM checkpoint (torch_dist) from a Hugging Face model or a furlong checkpoint."""
    parser = _parser("convert hf-to-megatron", hf_to_megatron.__doc__)
    parser.add_argument(
        "source", metavar="SOURCE", nargs="?", type=Path, help="Hugging Face model, or a --save directory"
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", type=Path, help="directory to write")
    _option(
        parser,
        "--hf-checkpoint",
        "--hf-model-path",
        type=Path,
        metavar="DIR",
        help="Hugging Face model; needed if SOURCE is a --save directory",
    )
    _option(parser, "--save", "--save-path", type=Path, metavar="DIR", help="TARGET")
    parser.add_argument("--iteration", type=int, metavar="N", help="write iter_N instead of release")
    for name in LAYOUT_FLAGS:
        known = f"--{name}-{'' if name == 'context' else 'model-'}parallel-size"
        parser.add_argument(known, type=int, metavar="N", help="no effect: any parallel layout can load the result")
    options = parser.parse_args(words)
    origin, target = options.source or options.hf_checkpoint, options.target or options.save
    if origin is None or target is None:
        raise ConfigError("furlong convert hf-to-megatron needs a SOURCE and a TARGET (or --hf-checkpoint and --save)")
    origin = Path(resolve_model("SOURCE", str(origin)))
    config = Path(resolve_model("--hf-checkpoint", str(options.hf_checkpoint or origin)))
    source = _source(origin, options.step)
    _need_config(config)
    name = "release" if options.iteration is None else f"iter_{options.iteration:07d}"
    final = target / name
    _free(final, options.force)
    tool, dtype = _conversion(), _dtype(options.dtype)
    with atomic_folder(final) as partial, tool.open_weights(source, config) as weights:
        num_bytes = tool.write_dist(weights, partial, dtype=dtype, iteration=options.iteration or 0)
        with tool.open_weights(partial, config) as written:
            count = tool.check_same(weights, written, dtype=dtype)
    write_atomically(target / TRACKER, "release" if options.iteration is None else f"{options.iteration}\n")
    show(f"{final}: {count} tensors, {size_text(num_bytes)}, read back and equal")
    if source == config:
        _forward(options.forward, tool, final, config, num_bytes)
    return 0


def megatron_to_hf(words: Sequence[str]) -> int:
    """Write a Hugging Face model from a Megatron-LM checkpoint (torch_dist) or a furlong checkpoint."""
    parser = _parser("convert megatron-to-hf", megatron_to_hf.__doc__)
    parser.add_argument(
        "source", metavar="SOURCE", nargs="?", type=Path, help="directory of checkpoints, or one of them"
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", type=Path, help="directory to write")
    _option(parser, "--input-dir", "--load", type=Path, metavar="DIR", help="SOURCE")
    _option(parser, "--output-dir", "--save", type=Path, metavar="DIR", help="TARGET")
    what = "Hugging Face model whose config.json, tokenizer and other files are copied"
    _option(parser, "--hf-checkpoint", "--origin-hf-dir", type=Path, metavar="DIR", help=what)
    options = parser.parse_args(words)
    origin, target = options.source or options.input_dir, options.target or options.output_dir
    if origin is None or target is None or options.hf_checkpoint is None:
        raise ConfigError("furlong convert megatron-to-hf needs a SOURCE, a TARGET and --hf-checkpoint")
    config = Path(resolve_model("--hf-checkpoint", str(options.hf_checkpoint)))
    _need_config(config)
    source = _source(origin, options.step)
    _free(target, options.force)
    tool, dtype = _conversion(), _dtype(options.dtype)
    with atomic_folder(target) as partial, tool.open_weights(source, config) as weights:
        num_bytes = tool.write_hf(weights, partial, dtype=dtype, companions=config)
        with tool.open_weights(partial, partial) as written:
            count = tool.check_same(weights, written, dtype=dtype)
        findings = check_weights(partial)
        if any(finding.severity == "error" for finding in findings):
            show_findings(findings, well="")
            raise CheckpointError(f"the model converted from {source} is incomplete; check SOURCE with `furlong check`")
    show(f"{target}: {count} tensors, {size_text(num_bytes)}, read back and equal; files and layers are complete")
    _forward(options.forward, tool, source, target, num_bytes)
    return 0


def _parser(name: str, description: str | None) -> argparse.ArgumentParser:
    parser = command_parser(name, description, has_json=False)
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


def _need_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; give the model's Hugging Face folder with --hf-checkpoint")


def _source(folder: Path, step: int | None) -> Path:
    from furlong.training.megatron_lm.dist_files import is_dist_folder  # imports torch

    if (folder / "config.json").is_file() or is_dist_folder(folder) or (folder / "trainer.json").is_file():
        return folder
    if (folder / "trainer").is_dir():
        return folder / "trainer"
    newest = tracker_text(folder) if step is None else ""
    name = f"iter_{step:07d}" if step is not None else newest if newest == "release" else f"iter_{newest:0>7}"
    if is_dist_folder(folder / name):
        return folder / name
    checkpoint = find_checkpoint(folder, step=step, save_dir=None, flag="checkpoint")
    assert checkpoint is not None  # without save_dir, a missing checkpoint is an error
    return checkpoint / "trainer"


def _free(target: Path, is_forced: bool) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not is_forced:
        raise ConfigError(f"{target} already exists; choose another directory, or replace it with --force")


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, DTYPES[name])


def _forward(mode: str, tool: Any, source: Path, hf_folder: Path, num_bytes: int) -> None:
    """Compare the logits of both models if asked to, or if both fit into half of the free memory."""
    needed, free = 4 * num_bytes, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if mode == "off" or (mode == "auto" and needed > free / 2):
        show(
            f"logits not compared: needs about {size_text(needed)} of {size_text(free)} free memory; "
            "compare with --forward on"
        )
        return
    with tool.open_weights(source, hf_folder) as weights:
        worst = tool.check_forward(weights, hf_folder)
    show(f"largest difference of the logits of both models: {worst:.1e}")


def hf_to_fp8(words: Sequence[str]) -> int:
    """Quantize a Hugging Face model to FP8 (E4M3), with scales per block, output channel or tensor."""
    parser = _quantize_parser("convert hf-to-fp8", hf_to_fp8.__doc__)
    parser.add_argument("--strategy", choices=("block", "channel", "tensor"), default="block", help="what has a scale")
    _option(parser, "--block-size", nargs=2, type=int, metavar="N", help="rows and columns (default: 128 128)")
    _option(parser, "--scale-fmt", choices=("ue8m0",), help="round scales of blocks up to powers of two")
    _calibration_option(parser)
    _option(parser, "--max-workers", type=int, metavar="N", help="no effect: one file is in memory at a time")
    options = parser.parse_args(words)
    from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled

    if options.strategy != "block" and (options.block_size or options.scale_fmt):
        raise ConfigError(
            f"--block-size and --scale-fmt apply to blocks, not to --strategy {options.strategy}; remove them"
        )
    sizes = options.block_size or (128, 128)
    if min(sizes) < 1:
        raise ConfigError(f"--block-size is {sizes[0]} {sizes[1]}, must be two positive integers; use 128 128")
    if options.strategy == "block":
        form = Fp8Blocks((sizes[0], sizes[1]), is_power_of_two=options.scale_fmt == "ue8m0")
    else:
        form = Fp8Scaled("tensor" if options.strategy == "tensor" else "channel")
    return _quantize(options, form)


def hf_to_int4(words: Sequence[str]) -> int:
    """Quantize a Hugging Face model to INT4 (W4A16, compressed-tensors' pack-quantized layout, symmetric)."""
    parser = _quantize_parser("convert hf-to-int4", hf_to_int4.__doc__)
    _option(parser, "--group-size", type=int, default=32, metavar="N", help="columns per scale (default: 32)")
    parser.add_argument(
        "--observer", choices=("minmax", "mse"), default="minmax",
        help="scale of a group: from its largest magnitude, or the one with the least squared error",
    )  # fmt: skip
    _calibration_option(parser)
    _option(parser, "--is-symmetric", action="store_true", help="no effect: groups are always symmetric")
    _option(parser, "--max-workers", type=int, metavar="N", help="no effect: one file is in memory at a time")
    _option(
        parser, "--ignore-rules", nargs="+", metavar="PATTERN",
        help="replace the built-in list of what stays unquantized (slime's name)",
    )  # fmt: skip
    parser.add_argument(
        "--only-experts", action="store_true", help="quantize routed experts only, as slime's converter"
    )
    options = parser.parse_args(words)
    if options.group_size < 1:
        raise ConfigError(f"--group-size is {options.group_size}, must be a positive integer; use 32 or 128")
    if options.only_experts and options.ignore_rules:
        raise ConfigError("--only-experts and --ignore-rules both replace the built-in list; give one of them")
    from furlong.quantization.int4 import Int4Groups

    defaults = ALL_BUT_EXPERTS if options.only_experts else options.ignore_rules
    form = Int4Groups(options.group_size, observer=options.observer)
    return _quantize(options, form, defaults=defaults)


def dequantize(words: Sequence[str]) -> int:
    """Write a quantized Hugging Face model with whole weights, in the precision of its other weights."""
    parser = _quantize_parser("convert dequantize", dequantize.__doc__, has_ignore=False)
    options = parser.parse_args(words)
    source, target = _places(options)
    from furlong.tools.quantize_folder import dequantize_folder

    return _converted(target, "made whole", lambda folder: dequantize_folder(source, folder))


def _calibration_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate", type=Path, nargs="?", const=True, metavar="TEXT",
        help="choose weights for the inputs of samples of the model, or of this text (GPTQ); weight updates in "
        "training replace them",
    )  # fmt: skip


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibrate {path} cannot be read: {error}; give a text file in UTF-8, or write --calibrate after SOURCE "
            "and TARGET, without a text, for samples of the model"
        ) from error


def _quantize(options: argparse.Namespace, form: Any, *, defaults: Sequence[str] | None = None) -> int:
    text = _text(options.calibrate) if isinstance(options.calibrate, Path) else None
    source, target = _places(options)
    from furlong.tools.calibration import Calibration
    from furlong.tools.quantize_folder import quantize_folder

    calibration = None if options.calibrate is None else Calibration(text)
    return _converted(
        target,
        f"quantized to {form.description}",
        lambda folder: quantize_folder(
            source, folder, form, ignore=options.ignore, defaults=defaults, calibration=calibration
        ),
    )


def _converted(target: Path, what: str, write: Callable[[Path], Any]) -> int:
    with atomic_folder(target) as partial:
        done = write(partial)
        findings = [each for each in check_model(partial, id="QNT02") if each.severity == "error"]
        if findings:
            show_findings(findings, well="")
            raise CheckpointError(
                f"{target} was not written, because its check failed; correct the ignore list, or check SOURCE with "
                "`furlong check`"
            )
    calibrated = f" ({done.num_calibrated} calibrated)" if done.num_calibrated else ""
    show(
        f"{target}: {done.num_quantized} of {done.num_tensors} tensors {what}{calibrated}, "
        f"{size_text(done.source_bytes)} -> "
        f"{size_text(done.num_bytes)}; read back and equal; files, layers and ignore list are complete"
    )
    return 0


def _quantize_parser(name: str, description: str | None, *, has_ignore: bool = True) -> argparse.ArgumentParser:
    parser = command_parser(name, description, has_json=False)
    parser.add_argument("source", metavar="SOURCE", nargs="?", type=Path, help="Hugging Face model")
    parser.add_argument("target", metavar="TARGET", nargs="?", type=Path, help="directory to write")
    _option(parser, "--model-dir", "--input-fp8-hf-path", type=Path, metavar="DIR", help="SOURCE")
    _option(parser, "--save-dir", "--output-bf16-hf-path", "--output-dir", type=Path, metavar="DIR", help="TARGET")
    parser.add_argument("--force", "-f", "--overwrite", action="store_true", help="replace an existing TARGET")
    if has_ignore:
        what = "leave these unquantized too: names, or re:PATTERN (embeddings, lm_head, norms and routers always are)"
        parser.add_argument("--ignore", nargs="+", default=[], metavar="PATTERN", help=what)
    return parser


def _option(parser: argparse.ArgumentParser, *names: str, **settings: Any) -> None:
    """Add an option with hyphens and with underscores, under the first name."""
    spelled = dict.fromkeys(form for name in names for form in (name, f"--{name[2:].replace('-', '_')}"))
    parser.add_argument(*spelled, dest=names[0][2:].replace("-", "_"), **settings)


def _places(options: argparse.Namespace) -> tuple[Path, Path]:
    source, target = options.source or options.model_dir, options.target or options.save_dir
    if source is None or target is None:
        raise ConfigError("give a SOURCE and a TARGET (or --model-dir and --save-dir)")
    source = Path(resolve_model("SOURCE", str(source)))
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json; give a Hugging Face model folder")
    if source.resolve() == target.resolve():
        raise ConfigError(f"SOURCE and TARGET are both {source}; write into another directory")
    _free(target, options.force)
    return source, target
