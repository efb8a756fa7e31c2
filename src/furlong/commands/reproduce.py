"""Command `furlong reproduce`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from furlong.commands.output import command_parser, show
from furlong.errors import ConfigError


def reproduce(words: list[str]) -> int:
    """Run rows of the results page over several seeds and compare with the published accuracy; without rows, list them.

    Exit code 1 if a row failed, or its interval and the published one do not overlap.
    """
    from furlong.config.hub import resolve_model
    from furlong.reproduce.published import comparison, read_published
    from furlong.reproduce.rows import Settings, find_row
    from furlong.reproduce.run_row import run_row

    options = _parse(words)
    if not options.rows:
        _list_rows(as_json=options.json)
        return 0
    code, results = 0, dict[str, Any]()
    model = options.model
    if model is not None:
        if not options.print_only:
            model = resolve_model("--model", model)
        model = os.path.abspath(model) if os.path.exists(model) else model
    chosen = [find_row(name) for name in options.rows]
    for row in chosen:
        settings = Settings(
            tuple(dict.fromkeys(options.seeds)),
            options.out / row.name,
            options.steps,
            options.parallel,
            options.row_limit,
            model,
            options.trl_python,
        )
        if options.print_only:
            _print_commands(row, settings)
            continue
        announce = (lambda _: None) if options.json else show
        result = run_row(row, settings, announce)
        compared = comparison(result, read_published().get(row.name))
        results[row.name] = {**result, "comparison": compared.text, "agrees": compared.agrees}
        code |= int(result["status"] == "failed" or compared.agrees is False)
        written = "result.json, curve.svg" if "curves" in result else "result.json"
        announce(f"{row.name}: {_summary(result)}\n{compared.text}\n{settings.out}: {written}\n")
    if options.json:
        show(json.dumps(results, indent=1))
    return code


def _parse(words: list[str]) -> argparse.Namespace:
    parser = command_parser("reproduce", reproduce.__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows of the results page")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: those of the row)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="seeds to run at a time (default: 1)")
    parser.add_argument("--row-limit", type=float, metavar="SECONDS", help="time limit of a row, which fails then")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/reproduce"),
        metavar="DIR",
        help="folder of runs and results, with one folder per row (default: outputs/reproduce)",
    )
    parser.add_argument("--model", metavar="DIR", help="model folder or name on the Hub, for rows that need one")
    parser.add_argument("--trl-python", type=Path, metavar="PATH", help="a Python with TRL, for rows of TRL")
    parser.add_argument("--print-only", action="store_true", help="print the commands without running them")
    options = parser.parse_args(words)
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps} is too small; give at least 1")
    if options.parallel < 1:
        raise ConfigError(f"--parallel {options.parallel} is too small; give at least 1")
    if options.row_limit is not None and not options.row_limit > 0:
        raise ConfigError(f"--row-limit {options.row_limit:g} is not a time; give seconds above 0")
    if wrong := [seed for seed in options.seeds if seed < 1]:
        raise ConfigError(f"--seeds {wrong[0]} is not a seed; give numbers from 1")
    return options


def _print_commands(row: Any, settings: Any) -> None:
    from furlong.reproduce.rows import prepare_commands, seed_commands, shown_command

    for seed in settings.seeds:
        commands = [*prepare_commands(row, settings), *seed_commands(row, settings, seed).values()]
        show("\n".join(map(shown_command, commands)))


def _summary(result: Mapping[str, Any]) -> str:
    if result["status"] == "failed":
        return f"failed, {result['reason']}"
    before, after = (
        f"{part['value']:.1%} ({part['low']:.1%}-{part['high']:.1%})" for part in (result["before"], result["after"])
    )
    return f"accuracy {before} before, {after} after {result['steps']} steps; {len(result['seeds'])} seeds"


def _list_rows(*, as_json: bool) -> None:
    from furlong.reproduce.published import read_published
    from furlong.reproduce.rows import NEEDS, read_rows

    published = read_published()
    groups, rows = read_rows()
    if as_json:
        listed = {
            name: {"method": row.method, "task": row.task.title, "published": published.get(name)}
            for name, row in rows.items()
        }
        show(json.dumps(listed, indent=1))
        return
    width = max(map(len, rows))
    for name, group in groups.items():
        show(f"{group.title}")
        for row in rows.values():
            if row.group == name:
                result = published.get(row.name)
                needs = ", ".join(NEEDS[need] for need in row.needs)
                state = f"published: {_summary(result)}" if result else "not run yet"
                show(
                    f"  {row.name:{width}}  {row.method}; {row.task.title}\n  {'':{width}}  {state}"
                    + (f"; needs {needs}" if needs else "")
                )
