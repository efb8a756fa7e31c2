"""`furlong env`: check the installed packages."""

from __future__ import annotations

import argparse

from furlong.commands.output import findings_code, show, show_findings, show_json
from furlong.tools.environment import environment_findings, read_environment


def main(words: list[str]) -> int:
    """Compare installed versions with the tested ones and load compiled kernels; exit code 1 on a problem."""
    parser = argparse.ArgumentParser(prog="furlong env", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    found = read_environment()
    findings = environment_findings(found)
    if options.json:
        show_json(findings, environment=found.record())
        return findings_code(findings)
    driver = f", {found.driver}" if found.driver else ""
    show(f"furlong {found.furlong}, Python {found.python}, {found.machine}{driver}")
    for package in found.packages:
        state = "does not load" if package.problem else "" if package.is_tested else "not tested"
        show(f"  {package.name:20}{package.installed or '-':18}{package.tested:16}{state}".rstrip())
    show_findings(findings, well="all installed versions are tested")
    return findings_code(findings)
