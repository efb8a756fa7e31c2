"""Commands `furlong doctor`, which checks a launch command or a run, and `furlong env`, which checks packages."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

from furlong.commands.output import STYLES, Report, command_parser, show, show_findings, terminal_width
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
    report = Report(as_json="--json" in words)
    words = [word for word in words if word != "--json"]
    match words:
        case ["--run", folder]:
            return _examine_run(Path(folder), report)
        case ["--run", *folders]:
            raise ConfigError(f"furlong doctor --run needs one run directory; got {' '.join(folders) or 'none'}")
        case ["--list"]:
            return _list(report)
        case ["--explain", id]:
            return _explain(id, report)
        case ["--list" | "--explain", *_]:
            raise ConfigError(f"{' '.join(words)}: write `furlong doctor --list` or `furlong doctor --explain ID`")
        case [folder] if Path(folder).is_dir():
            raise ConfigError(f"{folder} is a directory; write `furlong doctor --run {folder}` to examine a run")
        case _:
            return _check(words, report)


def _check(words: list[str], report: Report) -> int:
    from furlong.config.command_line import examine
    from furlong.run.launch import findings_before_run

    findings = findings_before_run(*examine(words))
    counts = Counter(finding.severity for finding in findings)
    report.record({"ok": not counts["error"], "findings": [finding.record() for finding in findings]})
    if not report.as_json:
        show_findings(findings, well="no problems found")
        if findings:
            show(", ".join(f"{n} {severity}{'s' * (n != 1)}" for severity in STYLES if (n := counts[severity])))
    return int(counts["error"] > 0)


def _examine_run(folder: Path, report: Report) -> int:
    from furlong.diagnosis.postmortem.run_examination import examine

    result = examine(folder)
    report.record(result.record())
    report.text(result.headline())
    if result.is_healthy or result.status == "stopped":  # by a signal
        well = "no problems found"
    else:
        well = "no diagnosis besides this error" if result.error else "no known cause; see the run's log"
    report.findings(result.diagnoses, well=well)
    if result.last_words:
        report.text("", *result.last_words)
    return 0 if result.is_healthy else 1


def _list(report: Report) -> int:
    from furlong.catalogue import CATALOGUE

    report.record([row.record() for row in CATALOGUE.values()])
    report.text(*(f"{row.id:8} {row.moments:4} {row.severity:8} {row.title}" for row in CATALOGUE.values()))
    report.text("", "P before the run, R during the run, X after a failure; --explain ID describes a diagnosis")
    return 0


def _explain(id: str, report: Report) -> int:
    from furlong.catalogue import MOMENTS, find_row

    row = find_row(id)
    report.record(row.record())
    facts = {
        "when": ", ".join(MOMENTS[moment] for moment in row.moments) + f"; {row.severity}",
        "symptom": row.symptom,
        "cause": row.cause,
        "checked": row.checked,
        "fix": row.remedy,
    }
    report.text(f"{row.id}: {row.title}")
    wrapper = textwrap.TextWrapper(
        terminal_width(), subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False
    )  # flags and paths are not split
    for name, text in facts.items():
        report.text(wrapper.fill(f"  {name:8} {text}"))
    return 0


def env(words: list[str]) -> int:
    """Compare installed versions with the tested ones and load compiled kernels; exit code 1 on a problem."""
    options = command_parser("env", env.__doc__).parse_args(words)
    environment = read_environment()
    findings = environment_findings(environment)
    report = Report(as_json=options.json)
    driver = f", {environment.driver}" if environment.driver else ""
    report.text(f"furlong {environment.furlong}, Python {environment.python}, {environment.machine}{driver}")
    for package in environment.packages:
        state = "does not load" if package.problem else "" if package.is_tested else "not tested"
        report.text(f"  {package.name:20}{package.installed or '-':18}{package.tested:16}{state}".rstrip())
    report.findings(findings, well="all installed versions are tested")
    return report.end(environment=environment.record())
