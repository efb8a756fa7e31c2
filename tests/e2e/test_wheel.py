"""The wheel has everything that commands read, and works where there is no clone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import furlong
from loopback_hub import loopback_hub

SOURCE = Path(furlong.__file__).parent


def test_an_installed_wheel_trains_and_shows_the_run(tmp_path):
    options = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    # a copy, since setuptools writes into the folder that it builds
    project = tmp_path / "project"
    subprocess.run(["git", "clone", "--quiet", SOURCE.parents[1], project], check=True)
    build = [sys.executable, "-m", "pip", "wheel", *options, "--no-build-isolation", "--wheel-dir", tmp_path]
    subprocess.run([*build, project], check=True)
    [wheel] = tmp_path.glob("furlong_rl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("furlong/")}
    listed = subprocess.run(
        ["git", "-C", project, "ls-files", "src/furlong"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.removeprefix("src/") for name in listed} == packed
    site, home = tmp_path / "site", tmp_path / "home"
    home.mkdir()
    install = [sys.executable, "-m", "pip", "install", *options, "--target", site]
    subprocess.run([*install, wheel], check=True)
    env = {**os.environ, "PYTHONPATH": str(site), "HOME": str(home), "OMP_NUM_THREADS": "1"}

    def command(*words: str) -> str:
        code = "import sys, furlong.cli; sys.exit(furlong.cli.main(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=home, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import furlong; print(furlong.__file__)"
    done = subprocess.run([sys.executable, "-c", where], cwd=home, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(site))
    command("quickstart", "--num-rollout", "2")
    assert "step" in command("report", "outputs/quickstart")
    command("view", "outputs/quickstart", "--export", "page.html")
    assert (home / "page.html").stat().st_size > 10_000

    def script(model: str) -> list[float]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, model], cwd=home, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    model = site / "furlong/quickstart/model"
    assert len(script(str(model))) == 2
    with loopback_hub() as hub:
        hub.add("models", "tiny/adder", model)
        env["HF_ENDPOINT"], env["HF_HUB_OFFLINE"] = hub.url, "0"
        assert len(script("tiny/adder")) == 2


SCRIPT = """
import json, sys
import furlong

rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(20, 28) for b in range(30, 38)]

def reward(response, label):
    return float(response.removesuffix("<|im_end|>") == label)

run = furlong.train(model=sys.argv[1], prompt_data=rows, reward=reward, lr=1e-4, rollout_max_response_len=8)
print(json.dumps([row["rollout/raw_reward"] for row in run.rows]))
"""
