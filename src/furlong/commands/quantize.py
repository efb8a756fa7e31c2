"""`furlong convert hf-to-fp8`, `hf-to-int4` and `dequantize`: folders of quantized weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from furlong.commands.output import command_parser, show, show_findings
from furlong.errors import CheckpointError, ConfigError
from furlong.files.atomic import atomic_folder
from furlong.tools.memory_plan import size_text
from furlong.tools.model_folder import check_model

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


def hf_to_fp8(words: Sequence[str]) -> int:
    """Quantize a Hugging Face model to FP8 (E4M3), with scales per block, output channel or tensor."""
    parser = _parser("convert hf-to-fp8", hf_to_fp8.__doc__)
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
    parser = _parser("convert hf-to-int4", hf_to_int4.__doc__)
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
    parser = _parser("convert dequantize", dequantize.__doc__, has_ignore=False)
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
    """Read the text of --calibrate. Raises ConfigError if it cannot be read."""
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


def _parser(name: str, description: str | None, *, has_ignore: bool = True) -> argparse.ArgumentParser:
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
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json; give a Hugging Face model folder")
    if source.resolve() == target.resolve():
        raise ConfigError(f"SOURCE and TARGET are both {source}; write into another directory")
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not options.force:
        raise ConfigError(f"{target} already exists; choose another directory, or replace it with --force")
    return source, target
