"""`furlong replay`: train the step of a bundle and compare it with the recorded metrics."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path

from furlong.commands.output import show
from furlong.errors import ConfigError
from furlong.tools.run_bundle import read_bundle, shape_differences, unpack
from furlong.tracking.run_files import METRICS, read_rows


def main(words: list[str]) -> int:
    """Train the step of a bundle without an engine; exit code 1 if its metrics differ from the recorded ones.

    Further flags of `furlong train` override those of the bundle.
    """
    parser = argparse.ArgumentParser(prog="furlong replay", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="file written by `furlong bundle`")
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR", type=Path, help="model of the run")
    parser.add_argument(
        "--output-dir", metavar="DIR", type=Path, help="run directory (default: outputs/replay, -2, ...)"
    )
    parser.add_argument("--rtol", type=float, default=1e-3, help="relative tolerance (default: 0.001)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, more = parser.parse_known_args(words)
    bundle = read_bundle(options.bundle)
    if different := shape_differences(bundle, options.hf_checkpoint):
        shown = "; ".join(f"{name} was {was}, is {now}" for name, (was, now) in list(different.items())[:5])
        raise ConfigError(
            f"--hf-checkpoint {options.hf_checkpoint} is not the model of the bundle: {shown}; give that model"
        )

    output = options.output_dir or _free(Path("outputs/replay"))
    if (output / METRICS).exists():
        raise ConfigError(f"--output-dir {output} already contains a run; choose another directory")

    from furlong.config.command_line import load
    from furlong.run.launch import run

    with tempfile.TemporaryDirectory(prefix="furlong-replay-") as folder:
        place = ["--hf-checkpoint", str(options.hf_checkpoint), "--output-dir", str(output)]
        run(load([*bundle.words(), *unpack(options.bundle, bundle, Path(folder)), *place, *more]))
    rows = {row["step"]: row for row in read_rows(output / METRICS, "step")}
    replayed = rows[bundle.step]
    table = [
        (name, recorded, replayed.get(name), _is_close(recorded, replayed.get(name), options.rtol))
        for name, recorded in bundle.metrics.items()
        if name in replayed
    ]
    is_same = all(close for *_, close in table)
    is_comparable = bundle.has_checkpoint or bundle.step == 1
    if options.json:
        metrics = {name: {"recorded": a, "replayed": b, "is_close": close} for name, a, b, close in table}
        show(json.dumps({"ok": is_same, "is_comparable": is_comparable, "metrics": metrics}, indent=1))
    else:
        lines = [
            f"{name:42} {_shown(a):>12} {_shown(b):>12}{'' if close else '  differs'}" for name, a, b, close in table
        ]
        show("\n".join([f"{f'step {bundle.step}':42} {'recorded':>12} {'replayed':>12}", *lines]))
        if not is_comparable:
            show(f"step {bundle.step} was trained from --hf-checkpoint; compare with a bundle made --with-checkpoint")
    return int(is_comparable and not is_same)


def _free(folder: Path) -> Path:
    """Return `folder`, or the first of FOLDER-2, FOLDER-3, ... that does not exist."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in itertools.count(1))
    return next(path for path in names if not path.exists())


def _is_close(a: float | None, b: float | None, rtol: float) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= rtol * max(abs(a), abs(b)) + 1e-8


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
