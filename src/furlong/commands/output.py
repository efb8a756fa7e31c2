"""Option parsers of the commands, and the report that each prints as text or JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from furlong.catalogue import Diagnosis
from furlong.core.json_values import parse_written_json
from furlong.core.text import BLOCKS, redact_credentials, shortened
from furlong.errors import ConfigError

LABEL = 8  # columns of the severity
STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def command_parser(name: str, description: str | None, *, has_json: bool = True) -> argparse.ArgumentParser:
    """Return the option parser of `furlong NAME`, with --json."""
    parser = argparse.ArgumentParser(prog=f"furlong {name}", allow_abbrev=False, description=description)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def subcommand(commands: Any, name: str, help: str, description: str | None = None) -> argparse.ArgumentParser:
    """Add a subcommand with --json to the result of `add_subparsers`."""
    parser = commands.add_parser(name, help=help, description=description or help, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def json_option(flag: str, text: str, example: str) -> dict[str, Any]:
    """Return the object that an option has as JSON. Raises ConfigError."""
    try:
        value = parse_written_json(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {shortened(text)} is not JSON: {error}; write {example}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} {shortened(text)} is not a JSON object; write {example}")
    return value


def show(text: str) -> None:
    """Print to stdout, without the credentials in URLs; a closed pipe (`| head`) is not an error."""
    try:
        print(redact_credentials(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Report:
    """The output of a command: text as it comes, or with --json one object at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._findings: list[Diagnosis] = []

    def text(self, *lines: str) -> None:
        """Print lines, unless the output is JSON."""
        if not self.as_json and lines:
            show("\n".join(lines))

    def record(self, value: Any) -> None:
        """Print a value that is all of the JSON output."""
        if self.as_json:
            show(json.dumps(value, indent=1))

    def findings(self, findings: Sequence[Diagnosis], *, well: str) -> None:
        """Print findings, or `well` if there are none; `end` adds them to the JSON object."""
        self._findings += findings
        if not self.as_json:
            show_findings(findings, well=well)

    def end(self, **values: Any) -> int:
        """Print {"ok": ..., "findings": [...], **values} as JSON; return 1 if there is a warning or an error."""
        code = int(any(finding.severity != "info" for finding in self._findings))
        self.record({"ok": not code, "findings": [finding.record() for finding in self._findings], **values})
        return code


def show_findings(findings: Sequence[Diagnosis], *, well: str) -> None:
    """Print findings with their severity, or `well` if there are none.

    Colored and wrapped on a terminal; plain, unwrapped lines in a file or pipe.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    width = console.width - LABEL if console.is_terminal else None
    with console.capture() as written:
        for finding in findings:
            style = STYLES[finding.severity]
            shown = Text(finding.text(width).replace("\n", "\n" + " " * LABEL))
            shown.stylize(style, 0, len(finding.id) + 2)
            console.print(Text.assemble((f"{finding.severity:{LABEL}}", style), shown))
    show(written.get().rstrip("\n") or well)


def prints_blocks() -> bool:
    """Whether the encoding of stdout has the characters of `core.text.sparkline`."""
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def terminal_width(default: int = 120, most: int = 120) -> int:
    """Return the columns of the terminal, between 60 and `most`; `default` without a terminal."""
    return min(max(shutil.get_terminal_size((default, 24)).columns, 60), most)


def problems_text(error: ConfigError) -> str:
    """Return all problems of a command, numbered."""
    count = len(error.problems)
    head = "1 problem with this command" if count == 1 else f"{count} problems with this command"
    lines = [f"  {i}. {problem}".replace("\n", "\n     ") for i, problem in enumerate(error.problems, 1)]
    return "\n".join([f"{head}:", *lines])
