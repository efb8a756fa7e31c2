"""Commands that inspect runs: `furlong report`, `diff`, `bundle` and `replay`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from furlong.commands.output import Report, command_parser, prints_blocks
from furlong.core.tracing import merge
from furlong.data.audit import audit
from furlong.errors import ConfigError
from furlong.run.folder import free_folder
from furlong.tools.run_bundle import read_bundle, shape_differences, unpack, write_bundle
from furlong.tools.run_diff import as_json, compare_runs, findings, summarize, table
from furlong.tracking.run_files import METRICS, read_rows

SHOWN_METRICS = 12


def report(words: list[str]) -> int:
    """Summarize rewards and speed of runs, and audit their ledgers; exit code 1 if a group was lost or used twice."""
    parser = command_parser("report", report.__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN_DIR", help="run directories, or a directory of them")
    parser.add_argument("--ledger", metavar="RUN_DIR", help="another run, used only to audit its ledger")
    parser.add_argument(
        "--finished",
        action="store_true",
        help="runs are complete: count groups still in flight as lost, except those kept for a larger --num-rollout",
    )
    parser.add_argument(
        "--trace", action="store_true", help="merge the trace files of killed runs into trace.json, for ui.perfetto.dev"
    )
    options = parser.parse_args(words)
    runs = [run for path in options.runs for run in _runs(Path(path))]
    paths = [*runs, *([Path(options.ledger)] if options.ledger else [])]
    if not paths:
        parser.error("name a run directory")
    without = [path for path in paths if not _ledger(path).exists()]
    ended_before = [path for path in without if (path / "config.json").is_file()]  # Ctrl-C while it starts, for example
    if without and (without != ended_before or without == paths):
        raise ConfigError(*(_no_ledger(path) for path in without))
    for path in ended_before:
        print(f"skipped {path}: no ledger.jsonl; the run ended before the first rollout", file=sys.stderr)
    audits = [audit(_ledger(path), finished=options.finished) for path in paths if path not in without]
    summaries = [summarize(_ledger(path).parent) for path in runs if path not in without]
    ok = all(result.ok for result in audits)
    out = Report(as_json=options.json)
    summary = {"runs": [as_json(run) for run in summaries]} if summaries else {}
    out.record({"ok": ok, "problems": [line for result in audits for line in result.problems]} | summary)
    parts = [table(summaries, draws_curves=prints_blocks())] if summaries else []
    parts += [result.summary() for result in audits if len(audits) == 1 or not result.ok]
    if len(audits) > 1 and ok:
        parts.append("every group of every run is accounted for")
    out.text("\n\n".join(parts))
    for run in runs if options.trace else ():
        if not any((run / "trace").glob("*.jsonl")):
            raise ConfigError(f"{run} has no trace; train with --trace, and give the run directory (--output-dir)")
        out.text(f"{merge(run / 'trace', run / 'trace.json')} events in {run}/trace.json; open it in ui.perfetto.dev")
    return 0 if ok else 1


def _ledger(path: Path) -> Path:
    return path / "ledger.jsonl" if path.is_dir() else path


def _runs(path: Path) -> list[Path]:
    """Return the runs directly below a directory that is not one, by name; else [path]."""
    is_run = (path / "config.json").is_file() or _ledger(path).exists()
    return [path] if is_run else sorted(ledger.parent for ledger in path.glob("*/ledger.jsonl")) or [path]


def _no_ledger(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such directory; give a run directory (--output-dir)"
    return f"{path}: no ledger.jsonl; give a run directory (--output-dir)"


def diff(words: list[str]) -> int:
    """Find the first step, stage and value in which two runs differ; exit code 1 if they do."""
    parser = command_parser("diff", diff.__doc__)
    parser.add_argument("run_a", metavar="RUN_A", type=Path, help="run directory (--output-dir)")
    parser.add_argument("run_b", metavar="RUN_B", type=Path, help="the other run directory")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance of metrics (default: 0)")
    options = parser.parse_args(words)
    comparison = compare_runs(options.run_a, options.run_b, rtol=options.rtol)
    report = Report(as_json=options.json)
    for m in comparison.metrics[:SHOWN_METRICS]:
        size = "" if m.largest is None else f"; largest relative difference {m.largest:.2e}"
        report.text(f"{m.name}: from step {m.step}, {m.a} against {m.b}{size}")
    if len(comparison.metrics) > SHOWN_METRICS:
        report.text(f"... and {len(comparison.metrics) - SHOWN_METRICS} more metrics")
    stages = f"{comparison.num_stages} stages and " if comparison.num_stages else ""
    well = f"no difference: {stages}all metrics of {comparison.steps[0]} steps are equal"
    report.findings(findings(comparison), well=well)
    return report.end(comparison=comparison.record())


def bundle(words: list[str]) -> int:
    """Save one step of a run to a file that `furlong replay` can train again elsewhere.

    The file contains tokens, but no paths, keys or text.
    """
    parser = command_parser("bundle", bundle.__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a run that saved its samples")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step number, as in metrics.jsonl")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="output file (default: RUN_NAME-stepN.zip)")
    parser.add_argument("--with-text", action="store_true", help="include prompts, responses, labels and metadata")
    parser.add_argument("--with-checkpoint", action="store_true", help="include the weights before the step")
    options = parser.parse_args(words)
    output: Path = options.output or Path(f"{options.run.resolve().name}-step{options.step}.zip")
    saved = write_bundle(
        options.run, options.step, output, with_text=options.with_text, with_checkpoint=options.with_checkpoint
    )
    size = output.stat().st_size
    report = Report(as_json=options.json)
    report.record({"file": str(output), "bytes": size, "left_out": saved.left_out, "has_text": saved.has_text})
    report.text(f"{output}: step {saved.step}, {size / 1024:.0f} KiB, {'with' if saved.has_text else 'without'} text")
    if saved.left_out:
        report.text(f"left out: the values of {', '.join(saved.left_out)}; describe them in the report")
    if saved.step > 1 and not saved.has_checkpoint:
        report.text(
            "no checkpoint included: a replay starts from --hf-checkpoint, with the same shapes but other numbers"
        )
    return 0


def replay(words: list[str]) -> int:
    """Train the step of a bundle without an engine; exit code 1 if its metrics differ from the recorded ones.

    Further flags of `furlong train` override those of the bundle.
    """
    parser = command_parser("replay", replay.__doc__)
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="file written by `furlong bundle`")
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR", type=Path, help="model of the run")
    parser.add_argument(
        "--output-dir", metavar="DIR", type=Path, help="run directory (default: outputs/replay, -2, ...)"
    )
    parser.add_argument("--rtol", type=float, default=1e-3, help="relative tolerance (default: 0.001)")
    options, flags = parser.parse_known_args(words)
    from furlong.config.hub import resolve_model

    options.hf_checkpoint = Path(resolve_model("--hf-checkpoint", str(options.hf_checkpoint)))
    saved = read_bundle(options.bundle)
    if different := shape_differences(saved, options.hf_checkpoint):
        shown = "; ".join(f"{name} was {was}, is {now}" for name, (was, now) in list(different.items())[:5])
        raise ConfigError(
            f"--hf-checkpoint {options.hf_checkpoint} is not the model of the bundle: {shown}; give that model"
        )
    output = options.output_dir or free_folder(Path("outputs/replay"))
    if (output / METRICS).exists():
        raise ConfigError(f"--output-dir {output} already contains a run; choose another directory")

    from furlong.config.command_line import load
    from furlong.run.launch import run

    with tempfile.TemporaryDirectory(prefix="furlong-replay-") as folder:
        paths = ["--hf-checkpoint", str(options.hf_checkpoint), "--output-dir", str(output)]
        run(load([*saved.words(), *unpack(options.bundle, saved, Path(folder)), *paths, *flags]))
    replayed = next(row for row in read_rows(output / METRICS, "step") if row["step"] == saved.step)
    rows = [
        (name, recorded, replayed[name], _is_close(recorded, replayed[name], options.rtol))
        for name, recorded in saved.metrics.items()
        if name in replayed
    ]
    is_same = all(close for *_, close in rows)
    is_comparable = saved.has_checkpoint or saved.step == 1
    report = Report(as_json=options.json)
    metrics = {name: {"recorded": a, "replayed": b, "is_close": close} for name, a, b, close in rows}
    report.record({"ok": is_same, "is_comparable": is_comparable, "metrics": metrics})
    report.text(f"{f'step {saved.step}':42} {'recorded':>12} {'replayed':>12}")
    report.text(
        *(f"{name:42} {_number(a):>12} {_number(b):>12}{'' if close else '  differs'}" for name, a, b, close in rows)
    )
    if not is_comparable:
        report.text(f"step {saved.step} was trained from --hf-checkpoint; compare with a bundle made --with-checkpoint")
    return int(is_comparable and not is_same)


def _is_close(a: float | None, b: float | None, rtol: float) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= rtol * max(abs(a), abs(b)) + 1e-8


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
