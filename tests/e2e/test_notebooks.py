"""The cells of the example notebooks run in order, as in a notebook: in `__main__`, under a running event loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples/notebooks").glob("*.ipynb"))
RUNNER = """
import asyncio, json, sys

async def run():
    for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
        if cell["cell_type"] == "code":
            code = "".join(cell["source"]).replace("NUM_ROLLOUT = 40", "NUM_ROLLOUT = 2")
            exec(compile(code, f"/tmp/ipykernel_1/{number}.py", "exec"), globals())

asyncio.run(run())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, notebook], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "outputs").is_dir()
