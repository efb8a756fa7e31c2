"""Option parsers of the commands, and printing of results and findings."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from furlong.catalogue import Diagnosis
from furlong.core.text import BLOCKS, redact_credentials
from furlong.errors import ConfigError


def command_parser(name: str, description: str | None, *, has_json: bool = True) -> argparse.ArgumentParser:
    """Return the option parser of `furlong NAME`, with --json."""
    parser = argparse.ArgumentParser(prog=f"furlong {name}", allow_abbrev=False, description=description)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def show(text: str) -> None:
    """Print to stdout, without the credentials in URLs; a closed pipe (`| head`) is not an error."""
    try:
        print(redact_credentials(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


LABEL = 8  # columns of the severity
STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def show_json(findings: Sequence[Diagnosis], **more: Any) -> None:
    """Print {"ok": ..., "findings": [...], **more} as JSON."""
    ok = not findings_code(findings)
    show(json.dumps({"ok": ok, "findings": [finding.record() for finding in findings], **more}, indent=1))


def findings_code(findings: Sequence[Diagnosis]) -> int:
    """Return the exit code: 1 if there is a warning or an error."""
    return int(any(finding.severity != "info" for finding in findings))
