"""The manifest of docs/guides/cluster.md: its mounts, and the GPUs that its entrypoint asks for."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from furlong.config.command_line import parse
from furlong.config.topology import Topology

MANIFEST = Path(__file__).parents[3] / "examples" / "cluster" / "ray-job.yaml"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return yaml.safe_load(MANIFEST.read_text())


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_mounts_name_volumes_and_limits_are_what_is_requested(manifest):
    for pod in pods(manifest):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            assert container["resources"]["requests"] == container["resources"]["limits"]  # a pod that is not evicted


def test_the_machines_have_the_gpus_that_the_entrypoint_asks_for(manifest):
    program, command, *words = shlex.split(manifest["spec"]["entrypoint"])
    assert (program, command) == ("furlong", "train")
    [workers] = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    config = parse(words).config
    assert Topology.of(config).num_gpus == workers["replicas"] * gpus
    assert config.cluster.ray_address == "auto"
    mounted = tuple(mount["mountPath"] for mount in container["volumeMounts"])
    paths = (config.rollout.hf_checkpoint, config.data.prompt_data, config.checkpoint.save, config.track.output_dir)
    assert all(str(path).startswith(mounted) for path in paths)
