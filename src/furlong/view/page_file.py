"""Writes the run page with its data to one HTML file, which needs no server."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from furlong.errors import ConfigError
from furlong.files.atomic import write_atomically
from furlong.view.page_app import STATIC
from furlong.view.run_pages import RunPages
from furlong.view.run_reader import RunReader

MAX_STEPS = 2000  # of a curve
MAX_SAMPLES = 200  # of a run: the newest training samples, and as many of evaluations
MAX_GROUPS = 1000
MODULES = (
    "elements.js", "source.js", "charts.js", "overview.js", "runs.js", "sample.js", "samples.js", "evaluations.js",
    "groups.js", "timeline.js", "config.js", "app.js",
)  # fmt: skip  # each after those that it imports


def write_page(runs: Sequence[RunReader], path: Path) -> int:
    """Write the page of runs to `path`; returns its bytes. Raises ConfigError if it cannot be written."""
    text = page_text(runs)
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(
            f"--export {path} cannot be written: {error.strerror or error}; choose another file"
        ) from error
    return len(text.encode())


def page_text(runs: Sequence[RunReader]) -> str:
    """Return the HTML. Scripts run only if their checksum is in the page's policy, and data cannot contain any."""
    data = {
        "time": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [run.summary() for run in runs],
        "answers": [_answers(RunPages(run)) for run in runs],
    }
    embedded = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS).decode()
    embedded = embedded.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    library, script = _text("vendor/uPlot.iife.min.js"), _bundle()
    license_text = f"/* uPlot\n{_text('vendor/uPlot.LICENSE')}*/\n"
    library = license_text + library
    style = _text("vendor/uPlot.min.css") + _text("app.css")
    sources = " ".join(f"'sha256-{_digest(part)}'" for part in (library, script))
    policy = f"default-src 'none'; script-src {sources}; style-src 'sha256-{_digest(style)}'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>furlong</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#view">Skip to the content</a>\n<header id="head"></header>\n'
        '<nav id="tabs" aria-label="Views"></nav>\n<main id="view" tabindex="-1"></main>\n'
        f'<script type="application/json" id="embedded">{embedded}</script>\n'
        f'<script>{library}</script>\n<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def _answers(pages: RunPages) -> dict[str, Any]:
    pages.samples.update()
    facts = pages.samples.facts()
    rows = pages.samples.page({}, limit=MAX_SAMPLES)["rows"]
    for name in facts["sets"]:
        rows += pages.samples.page({"set": name}, limit=MAX_SAMPLES // len(facts["sets"]))["rows"]
    places = [(row["file"], row["pos"]) for row in rows]
    answers = {kind: pages.answer(kind, {}) for kind in ("findings", "flow", "config", "timeline")}
    groups = [pages.answer("groups", {"offset": str(at)})["rows"] for at in range(0, MAX_GROUPS, 100)]
    return answers | {
        "metrics": pages.run.metrics(most=MAX_STEPS),
        "sample_facts": facts | {
            "steps": sorted({row["step"] for row in rows if not row["is_eval"]}),
            "eval_steps": sorted({row["step"] for row in rows if row["is_eval"]}),
            "num_waiting": 0,
        },
        "samples": {"total": len(rows), "rows": rows},
        "sample": {f"{file}:{pos}": pages.answer("sample", {"file": file, "pos": str(pos)}) for file, pos in places},
        "groups": {"rows": [row for part in groups for row in part]},
    }  # fmt: skip


def _bundle() -> str:
    """Return all modules as one: imports of each other and `export` are left out. Names are unique in all of them."""
    parts: list[str] = []
    for name in MODULES:
        text = re.sub(r'^import \{[^}]*\} from "\./[\w.]+";\n', "", _text(name), flags=re.MULTILINE)
        text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
        parts.append(text)
    return "".join(parts)


def _text(name: str) -> str:
    return STATIC.joinpath(*name.split("/")).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
