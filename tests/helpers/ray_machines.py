"""Simulated clusters for tests: each machine is a set of local Ray processes with its own address."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STORE_BYTES = 100 * 1024**2


@contextlib.contextmanager
def connected_machines(options: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Start machines, given options by address, and connect this process so that runs use them."""
    import ray  # after conftest.py has set its environment
    from ray.cluster_utils import Cluster

    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)  # `ray.init` stores the cluster address here
    machines = Cluster()
    with tempfile.TemporaryDirectory(prefix="furlong-ray-", dir="/tmp") as folder:  # short, for Unix sockets
        try:
            for address, more in options.items():
                machines.add_node(
                    node_ip_address=address, include_dashboard=False, object_store_memory=STORE_BYTES,
                    temp_dir=f"{folder}/{address}", **more,
                )  # fmt: skip
            ray.init(address=machines.address, log_to_driver=False, logging_level=logging.ERROR)
            yield
        finally:
            ray.shutdown()
            machines.shutdown()
