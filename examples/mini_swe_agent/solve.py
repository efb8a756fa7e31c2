"""One episode of mini-swe-agent, unmodified, on a toy repository: a command for `--agent-command`.

The task comes on stdin, the endpoint from the environment. The reward is 1 if the repository's tests pass at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(MSWEA_SILENT_STARTUP="1", MSWEA_COST_TRACKING="ignore_errors")

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

FILES = {
    "calc.py": "def double(x):\n    return x + 1\n",
    "tests.py": "from calc import double\n\nassert [double(x) for x in range(4)] == [0, 2, 4, 6]\n",
}


def main() -> None:
    """Let the agent work in the repository, and print the reward."""
    task = json.load(sys.stdin)
    settings = yaml.safe_load((package_dir / "config" / "default.yaml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            Path(folder, name).write_text(text)
        model = LitellmTextbasedModel(
            model_name=f"openai/{os.environ['OPENAI_MODEL']}",
            model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]},
        )
        limits = {"step_limit": 8, "cost_limit": 0}
        agent = DefaultAgent(model, LocalEnvironment(cwd=folder, timeout=20), **{**settings["agent"], **limits})
        ended = agent.run(task["prompt"])
        passed = subprocess.run([sys.executable, "tests.py"], cwd=folder, capture_output=True, check=False)
    print(json.dumps({"reward": float(passed.returncode == 0), "exit_status": ended.get("exit_status")}))


if __name__ == "__main__":
    main()
