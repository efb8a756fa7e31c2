"""Asks a Ray cluster for its machines, in a child process with a time limit: a Ray client retries for minutes.

The child, `python -m furlong.cluster.cluster_probe HOST:PORT`, prints one line of JSON: `nodes` or `error`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from furlong.cluster.nodes import Node
from furlong.errors import ClusterError

LIMIT_S = 20.0  # for the child: most of it is importing Ray
ANSWER_S = 5  # for the cluster
REFUSED = ("AuthenticationError", "UNAUTHENTICATED", "InvalidAuthToken", "authentication token")
QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_USAGE_STATS_ENABLED": "0"}


def cluster_nodes(address: str) -> tuple[list[Node], str]:
    """Return the machines of the cluster at HOST:PORT and the resource of a slot, "GPU" or "CPU".

    Raises ClusterError if it is not Ray's, has another version, or refuses this process' token.
    """
    command = [sys.executable, "-m", "furlong.cluster.cluster_probe", address]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **QUIET}, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"--ray-address {address}: no answer of Ray within {LIMIT_S:g} s, although a server listens there; use the "
            "address that `ray start --head` printed"
        ) from None
    answer = _answer(child.stdout)
    if answer is None or "error" in answer:
        raise _refusal(address, (answer or {}).get("error") or child.stderr)
    resource = "GPU" if any(node["gpus"] for node in answer["nodes"]) else "CPU"
    totals = [(node, int(node["gpus"] if resource == "GPU" else node["cpus"])) for node in answer["nodes"]]
    return [Node(node["id"], node["address"], total, total) for node, total in totals if total], resource


def _answer(output: str) -> dict[str, Any] | None:
    """Return the child's line; None if it ended without one."""
    line = next((line for line in reversed(output.splitlines()) if line.startswith("{")), None)
    return None if line is None else json.loads(line)


def _refusal(address: str, problem: str) -> ClusterError:
    """Make the error of a cluster that does not serve this process."""
    last = " ".join(problem.split())[-300:]
    if any(word in problem for word in REFUSED):
        return ClusterError(
            f"--ray-address {address}: the Ray cluster requires token authentication and refuses this process "
            f"({last}); set RAY_AUTH_MODE=token and the cluster's token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        )
    return ClusterError(
        f"--ray-address {address}: not a Ray cluster that this version can use ({last}); use the address that "
        "`ray start --head` printed, and the same version of Ray on all machines"
    )


def _nodes(address: str) -> list[dict[str, Any]]:
    """Ask the cluster. Raises Ray's errors, and RuntimeError for another version."""
    import ray
    from ray._common.usage import usage_lib
    from ray._raylet import GcsClient  # pyright: ignore  compiled

    client: Any = GcsClient(address=address)
    metadata: Any = usage_lib.get_cluster_metadata(client)
    if metadata and metadata["ray_version"] != ray.__version__:
        raise RuntimeError(f"it has Ray {metadata['ray_version']}, this machine {ray.__version__}")
    found: list[dict[str, Any]] = []
    for node in client.get_all_node_info(timeout=ANSWER_S).values():
        if node.state == 0:  # ALIVE
            resources = dict(node.resources_total)
            found.append(
                {
                    "id": node.node_id.hex(),
                    "address": node.node_manager_address,
                    "gpus": resources.get("GPU", 0),
                    "cpus": resources.get("CPU", 0),
                }
            )
    return found


if __name__ == "__main__":
    try:
        result: dict[str, Any] = {"nodes": _nodes(sys.argv[1])}
    except Exception as error:  # noqa: BLE001  the parent makes the message
        result = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Ray's threads may wait for a cluster that does not answer
