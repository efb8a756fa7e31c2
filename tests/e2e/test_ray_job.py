"""`ray job submit -- python train.py ...` on a cluster of one machine, and the command as a job server starts it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from furlong.data.audit import audit
from runs import MARK, REPOSITORY, environment, flags, free_ports, marked_processes, rows, write_prompts

pytestmark = pytest.mark.nightly

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
HOST = "127.0.0.1"
PORTS = ("ray-client-server", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
JOB_SERVER = ("aiohttp", "aiohttp_cors", "colorful", "opencensus", "prometheus_client", "smart_open", "virtualenv")
LACKING = [name for name in JOB_SERVER if importlib.util.find_spec(name) is None]
START_S, JOB_S, END_S = 60.0, 90.0, 20.0
STORE_BYTES = 100 * 1024**2


class Head:
    """A cluster of this machine with two slots. Everything that it starts has its mark in the environment."""

    def __init__(self, folder: Path, *, has_jobs: bool) -> None:
        self.mark, self.log = str(folder), folder / "head.txt"
        self.environment = environment(folder / "home") | {
            MARK: self.mark,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everything on 127.0.0.1
        }
        self.folder = tempfile.mkdtemp(prefix="furlong-ray-", dir="/tmp")  # short: it holds Unix sockets
        self.gcs, self.port, *others = free_ports(2 + len(PORTS))
        words = [
            "start", "--head", "--block", "--node-ip-address", HOST, "--port", self.gcs, "--num-cpus", 2,
            "--num-gpus", 0, "--object-store-memory", STORE_BYTES, "--temp-dir", self.folder, "--disable-usage-stats",
            "--include-dashboard", has_jobs, "--dashboard-host", HOST, "--dashboard-port", self.port,
            "--min-worker-port", 0, "--max-worker-port", 0,
        ]  # fmt: skip
        for name, port in zip(PORTS, others, strict=True):
            words += [f"--{name}-port", port]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*RAY, *map(str, words)], env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def wait(self) -> None:
        """Return when the cluster is there."""
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def submit(self, folder: Path, words: list[str]) -> str:
        """Have the job server run the command in a copy of the folder, as users do; returns what is printed."""
        told = {"env_vars": {"PYTHONPATH": self.environment["PYTHONPATH"], "OMP_NUM_THREADS": "1"}}
        address = f"http://{HOST}:{self.port}"
        return self._run(
            [*RAY, "job", "submit", "--address", address, "--working-dir", folder, "--runtime-env-json",
             json.dumps(told), "--", "python", "train.py", *words],
            folder,
        )  # fmt: skip

    def start(self, folder: Path, words: list[str]) -> str:
        """Run the command with the variables that a job server gives it; returns what it prints."""
        job = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}, "metadata": {"job_submission_id": "raysubmit_a"}}
        told = {"RAY_ADDRESS": f"{HOST}:{self.gcs}", "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
        return self._run([sys.executable, "train.py", *words], folder, **told)

    def _run(self, command: list[object], folder: Path, **told: str) -> str:
        self.wait()
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env=self.environment | told, capture_output=True, text=True,
            timeout=JOB_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def close(self) -> None:
        """End the cluster, whatever is left of it."""
        deadline = time.monotonic() + END_S
        while marked_processes(self.mark) and time.monotonic() < deadline:
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if process.environ().get(MARK) == self.mark:
                        process.kill()
            self.process.wait()
        shutil.rmtree(self.folder)


SERVER = pytest.mark.skipif(bool(LACKING), reason=f"the job server of ray[default] lacks {', '.join(LACKING)}")
NO_SERVER = pytest.mark.skipif(not LACKING, reason="the same is tried with a job server")


@pytest.mark.parametrize("is_submitted", [pytest.param(False, marks=NO_SERVER), pytest.param(True, marks=SERVER)])
def test_a_job_trains_in_its_folder_on_the_cluster_and_leaves_nothing(is_submitted, model, tmp_path):
    work, output = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    shutil.copy(REPOSITORY / "train.py", work)
    words = flags(model, write_prompts(work / "prompts.jsonl").name, output, rollout_num_gpus=1)
    head = Head(tmp_path, has_jobs=is_submitted)
    try:
        said = head.submit(work, words) if is_submitted else head.start(work, words)
        assert ("succeeded" in said) is is_submitted
        log = (output / "run.log").read_text()
        assert f"ray: connected to {HOST}:{head.gcs}" in log
        assert "trainer rank 0, process " in log
        assert f"engine http://{HOST}:" in log
        assert [row["step"] for row in rows(output)] == [1, 2]
        assert audit(output / "ledger.jsonl", finished=True).ok
        assert [line for line in marked_processes(head.mark) if "-m furlong" in line or "train.py" in line] == []
    finally:
        head.close()
