"""`furlong doctor`: check a launch command or a run, and explain diagnoses."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path

from furlong.commands.output import show, show_findings
from furlong.errors import ConfigError

USAGE = """usage: furlong doctor FLAGS [--json]
       furlong doctor --run DIR [--json]
       furlong doctor --list [--json]
       furlong doctor --explain ID [--json]

Check a launch command without starting it. FLAGS are those of `furlong train`.
Exit code 1 on an error, 0 if there are only warnings and notes.

  --run DIR     examine a run directory instead, while the run is in progress
                or after it ended, failed or was killed; exit code 0 if healthy
  --list        list all diagnoses
  --explain ID  explain a diagnosis: symptom, cause, check and fix
  --json        print JSON"""


def main(words: list[str]) -> int:
    """Check a launch command or a run; exit code 1 on an error."""
    if not words or "-h" in words or "--help" in words:
        show(USAGE)
        return 0 if words else 2
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    match words:
        case ["--run", folder]:
            return _examine_run(Path(folder), as_json=as_json)
        case ["--run", *named]:
            raise ConfigError(f"furlong doctor --run needs one run directory; got {' '.join(named) or 'none'}")
        case ["--list"]:
            return _list(as_json=as_json)
        case ["--explain", id]:
            return _explain(id, as_json=as_json)
        case ["--list" | "--explain", *_]:
            raise ConfigError(f"{' '.join(words)}: write `furlong doctor --list` or `furlong doctor --explain ID`")
        case _:
            return _check(words, as_json=as_json)


def _check(words: list[str], *, as_json: bool) -> int:
    from furlong.config.command_line import examine
    from furlong.diagnosis.preflight import preflight
    from furlong.run.run_folder import folder_problems

    resolved, problems = examine(words)
    found = preflight(resolved.config, [*problems, *folder_problems(resolved)])
    ok = not any(finding.severity == "error" for finding in found)
    if as_json:
        show(json.dumps({"ok": ok, "findings": [finding.record() for finding in found]}, indent=1))
    else:
        show_findings(found, well="no problems found")
        if found:
            counts = {severity: sum(f.severity == severity for f in found) for severity in ("error", "warning", "info")}
            show(", ".join(f"{n} {severity}{'s' * (n != 1)}" for severity, n in counts.items() if n))
    return 0 if ok else 1


def _examine_run(folder: Path, *, as_json: bool) -> int:
    """Print the status and problems of a run; exit code 1 if it has any. Raises ConfigError if it is not a run."""
    from furlong.diagnosis.postmortem.run_examination import examine

    result = examine(folder)
    if as_json:
        show(json.dumps(result.record(), indent=1))
    else:
        show(result.headline())
        show_findings(result.found, well="no problems found")
        if result.last_words:
            show("\n".join(["", *result.last_words]))
    return 0 if result.is_healthy else 1


def _list(*, as_json: bool) -> int:
    from furlong.core.catalogue import CATALOGUE

    if as_json:
        show(json.dumps([row.record() for row in CATALOGUE.values()], indent=1))
        return 0
    lines = [f"{row.id:8} {row.moments:4} {row.severity:8} {row.title}" for row in CATALOGUE.values()]
    show(
        "\n".join(
            [*lines, "", "P before the run, R during the run, X after a failure; --explain ID describes a diagnosis"]
        )
    )
    return 0


def _wrapped(name: str, text: str) -> str:
    """Wrap a named fact to the width of the terminal; flags and paths are not split."""
    width = min(max(shutil.get_terminal_size((120, 24)).columns, 60), 120)
    begin = f"  {name:8} "
    return textwrap.fill(
        text, width, initial_indent=begin, subsequent_indent=" " * len(begin), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _explain(id: str, *, as_json: bool) -> int:
    from furlong.core.catalogue import MOMENTS, find_row

    row = find_row(id)
    if as_json:
        show(json.dumps(row.record(), indent=1))
        return 0
    facts = {
        "when": ", ".join(MOMENTS[moment] for moment in row.moments) + f"; {row.severity}",
        "symptom": row.symptom,
        "cause": row.cause,
        "checked": row.checked,
        "fix": row.remedy,
    }
    lines = [f"{row.id}: {row.title}", *(_wrapped(name, text) for name, text in facts.items())]
    show("\n".join(lines))
    return 0
