"""Clusters of several machines for tests: each is a set of Ray's processes here, with an address of its own."""

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
    """Start machines, by address; runs use them because this process is connected to them."""
    import ray  # conftest.py sets what it reads when it is imported
    from ray.cluster_utils import Cluster

    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)  # where `ray.init` notes which cluster it is connected to
    machines = Cluster()
    with tempfile.TemporaryDirectory(prefix="furlong-ray-", dir="/tmp") as folder:  # short: it holds Unix sockets
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
