"""Run the code blocks of the documentation, each page in an empty folder: `run_docs.py README.md docs`.

With `--together` all pages share one folder, in the order of the arguments, as for a reader who tries them in turn.
Blocks fenced as `bash` or `python` run in order, in one folder per page. A block that fails or takes more than ten
minutes fails the page. Blocks with a title are skipped, and the title gives the reason: `bash title="needs a GPU"`.
Two pages run at a time, and each block uses one thread. Their commands have all imports done (`warm_python.py`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import warm_python

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT_S = 600
PAGES_AT_A_TIME = 2
ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str]) -> int:
    """Run every page. Return the number of pages that failed."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    is_together = "--together" in arguments
    pages = [
        page.resolve()
        for name in arguments
        if name != "--together"
        for page in (sorted(Path(name).rglob("*.md")) if Path(name).is_dir() else [Path(name)])
    ]
    if not is_together:  # no long page comes last
        pages.sort(key=lambda page: page.read_text().count("furlong train"), reverse=True)
    os.environ |= {"FURLONG_ROOT": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as work:
        folders = [Path(work) / ("all" if is_together else str(number)) for number in range(len(pages))]
        commands = warm_python.start(Path(work))
        with ThreadPoolExecutor(1 if is_together else PAGES_AT_A_TIME) as pool:
            passed = list(pool.map(partial(run_page, commands), pages, folders))
    failed = [page for page, succeeded in zip(pages, passed, strict=True) if not succeeded]
    print(f"{len(pages) - len(failed)} pages passed, {len(failed)} failed" + "".join(f"\n  {page}" for page in failed))
    return len(failed)


def run_page(commands: Path, page: Path, folder: Path) -> bool:
    """Run the blocks of one page in a folder until one fails. Return whether all succeeded."""
    folder.mkdir(exist_ok=True)
    for language, title, code in FENCE.findall(page.read_text()):
        if language not in ("bash", "python") or title.strip():
            continue
        started = time.monotonic()
        problem = run_block(language, code, folder, commands)
        first = code.strip().splitlines()[0]
        print(f"{page.name}: {first[:70]}: {problem or 'ok'} ({time.monotonic() - started:.1f} s)", flush=True)
        if problem:
            return False
    return True


def run_block(language: str, code: str, folder: Path, commands: Path) -> str:
    """Run one block. Return an error message, or an empty string on success."""
    env = os.environ | {"PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [commands / "python", "-c", code]
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"timed out after {LIMIT_S} s"
    if done.returncode == 0:
        return ""
    return f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
