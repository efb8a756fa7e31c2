"""Commands `furlong doctor`, which checks a launch command or a run, and `furlong env`, which checks packages."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path

from furlong.commands.output import (
    STYLES,
    command_parser,
    findings_code,
    show,
    show_findings,
    show_json,
    terminal_width,
)
from furlong.errors import ConfigError
from furlong.tools.environment import environment_findings, read_environment

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


def doctor(words: list[str]) -> int:
    """Check a launch command or a run; exit code 1 on an error."""
    if not words or "-h" in words or "--help" in words:
        show(USAGE)
        return 0 if words else 2
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    match words:
        case ["--run", folder]:
            return _examine_run(Path(folder), as_json=as_json)
        case ["--run", *folders]:
            raise ConfigError(f"furlong doctor --run needs one run directory; got {' '.join(folders) or 'none'}")
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
    from furlong.run.checks import findings_before_run

    resolved, problems = examine(words)
    findings = findings_before_run(resolved, problems)
    counts = Counter(finding.severity for finding in findings)
    ok = not counts["error"]
    if as_json:
        show(json.dumps({"ok": ok, "findings": [finding.record() for finding in findings]}, indent=1))
    else:
        show_findings(findings, well="no problems found")
        if findings:
            show(", ".join(f"{n} {severity}{'s' * (n != 1)}" for severity in STYLES if (n := counts[severity])))
    return 0 if ok else 1


def _examine_run(folder: Path, *, as_json: bool) -> int:
    """Print the status and problems of a run; exit code 1 if it has any. Raises ConfigError if it is not a run."""
    from furlong.diagnosis.postmortem.run_examination import examine

    result = examine(folder)
    if as_json:
        show(json.dumps(result.record(), indent=1))
    else:
        show(result.headline())
        unknown = (
            f"no known cause: the run {result.status}; {'the error above ended it' if result.error else 'see its log'}"
        )
        show_findings(result.diagnoses, well="no problems found" if result.is_healthy else unknown)
        if result.last_words:
            show("\n".join(["", *result.last_words]))
    return 0 if result.is_healthy else 1


def _list(*, as_json: bool) -> int:
    from furlong.catalogue import CATALOGUE

    if as_json:
        show(json.dumps([row.record() for row in CATALOGUE.values()], indent=1))
        return 0
    lines = [f"{row.id:8} {row.moments:4} {row.severity:8} {row.title}" for row in CATALOGUE.values()]
    legend = "P before the run, R during the run, X after a failure; --explain ID describes a diagnosis"
    show("\n".join([*lines, "", legend]))
    return 0


def _wrapped(name: str, text: str) -> str:
    """Wrap a named fact to the width of the terminal; flags and paths are not split."""
    begin = f"  {name:8} "
    return textwrap.fill(
        text,
        terminal_width(),
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _explain(id: str, *, as_json: bool) -> int:
    from furlong.catalogue import MOMENTS, find_row

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


def env(words: list[str]) -> int:
    """Compare installed versions with the tested ones and load compiled kernels; exit code 1 on a problem."""
    options = command_parser("env", env.__doc__).parse_args(words)
    environment = read_environment()
    findings = environment_findings(environment)
    if options.json:
        show_json(findings, environment=environment.record())
        return findings_code(findings)
    driver = f", {environment.driver}" if environment.driver else ""
    show(f"furlong {environment.furlong}, Python {environment.python}, {environment.machine}{driver}")
    for package in environment.packages:
        state = "does not load" if package.problem else "" if package.is_tested else "not tested"
        show(f"  {package.name:20}{package.installed or '-':18}{package.tested:16}{state}".rstrip())
    show_findings(findings, well="all installed versions are tested")
    return findings_code(findings)
