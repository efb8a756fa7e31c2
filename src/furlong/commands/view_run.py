"""`furlong view`: show runs on a local web page, or write the page to a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from furlong.commands.output import command_parser, show
from furlong.tracking.run_files import CONFIG
from furlong.view.page_app import serve_page
from furlong.view.page_file import write_page
from furlong.view.run_reader import open_runs


def view(words: list[str]) -> int:
    """Show runs on a local web page, also while they are in progress, or write the page to one file."""
    parser = command_parser("view", view.__doc__, has_json=False)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=Path, help="run directories (--output-dir), or a directory of them"
    )
    parser.add_argument(
        "--export", metavar="FILE", type=Path, help="write one self-contained HTML file instead of serving the page"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    options = parser.parse_args(words)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port {options.port} is not a port; use a number from 0 to 65535")
    runs = open_runs(options.runs)
    if options.export is not None:
        size = write_page(runs, options.export)
        show(f"{options.export}: {size / 1024:.0f} KiB; open it in a browser. It contains prompts and responses")
        return 0
    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    serve_page(
        runs,
        folders=[folder for folder in options.runs if not (folder / CONFIG).is_file()],
        host=options.host,
        port=options.port,
        opens_browser=not options.no_browser and has_display and sys.stdout.isatty(),
        announce=_announce,
    )
    return 0


def _announce(url: str) -> None:
    """Print the address with its token, which `show` would redact."""
    print(f"{url}\nThe address contains a token; Ctrl-C ends the page, not the run.", flush=True)
