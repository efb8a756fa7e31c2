"""The manifest of docs/guides/cluster.md against the fields of KubeRay's RayJob and of Kubernetes' pods."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from furlong.config.command_line import parse
from furlong.config.topology import Topology

MANIFEST = Path(__file__).parents[3] / "examples" / "cluster" / "ray-job.yaml"
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")
TEXTS = {"": str}  # a map of texts to texts

# ray.io/v1 (KubeRay 1.4): ray-operator/apis/ray/v1. A field with * is required; "" is the value of every key of a map;
# a list has one entry, which is what each of its items is.
RESOURCES = {"limits": {"": QUANTITY}, "requests": {"": QUANTITY}, "claims": [{"name*": str}]}
CONTAINER = {
    "name*": str, "image": str, "imagePullPolicy": str, "command": [str], "args": [str], "workingDir": str,
    "env": [{"name*": str, "value": str, "valueFrom": dict}], "envFrom": [dict], "lifecycle": dict,
    "ports": [{"containerPort*": int, "name": str, "protocol": str, "hostPort": int}], "resources": RESOURCES,
    "securityContext": dict, "volumeMounts": [{"mountPath*": str, "name*": str, "readOnly": bool, "subPath": str}],
}  # fmt: skip
VOLUME = {
    "name*": str, "persistentVolumeClaim": {"claimName*": str, "readOnly": bool},
    "hostPath": {"path*": str, "type": str}, "emptyDir": {"medium": str, "sizeLimit": QUANTITY},
    "configMap": dict, "secret": dict, "nfs": dict,
}  # fmt: skip
POD = {
    "containers*": [CONTAINER], "initContainers": [CONTAINER], "volumes": [VOLUME], "nodeSelector": TEXTS,
    "tolerations": [dict], "affinity": dict, "hostNetwork": bool, "hostIPC": bool, "serviceAccountName": str,
    "imagePullSecrets": [{"name": str}], "restartPolicy": str, "priorityClassName": str, "schedulerName": str,
}  # fmt: skip
METADATA = {"name": str, "namespace": str, "labels": TEXTS, "annotations": TEXTS}
TEMPLATE = {"metadata": METADATA, "spec": POD}
HEAD = {
    "rayStartParams*": TEXTS, "template*": TEMPLATE, "serviceType": str, "headService": dict, "enableIngress": bool,
}  # fmt: skip
WORKERS = {
    "groupName*": str, "replicas": int, "minReplicas*": int, "maxReplicas*": int, "numOfHosts": int,
    "rayStartParams*": TEXTS, "template*": TEMPLATE, "scaleStrategy": dict,
}  # fmt: skip
CLUSTER = {
    "headGroupSpec*": HEAD, "workerGroupSpecs": [WORKERS], "rayVersion": str, "enableInTreeAutoscaling": bool,
    "autoscalerOptions": dict, "headServiceAnnotations": TEXTS, "suspend": bool,
}  # fmt: skip
JOB = {
    "entrypoint": str, "rayClusterSpec": CLUSTER, "shutdownAfterJobFinishes": bool, "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int, "backoffLimit": int, "submissionMode": str, "submitterPodTemplate": TEMPLATE,
    "submitterConfig": {"backoffLimit": int}, "runtimeEnvYAML": str, "jobId": str, "metadata": TEXTS,
    "clusterSelector": TEXTS, "entrypointNumCpus": float, "entrypointNumGpus": float, "entrypointResources": str,
    "suspend": bool, "managedBy": str, "deletionStrategy": dict,
}  # fmt: skip
RAY_JOB = {"apiVersion*": str, "kind*": str, "metadata*": METADATA, "spec*": JOB}


def problems(value: Any, expected: Any, where: str) -> Iterator[str]:
    """What of a value is not as the fields say."""
    if isinstance(expected, re.Pattern):
        if not isinstance(value, str) or not expected.fullmatch(value):
            yield f"{where}: {value!r} is not a quantity"
    elif isinstance(expected, list):
        if not isinstance(value, list):
            yield f"{where}: {value!r} is not a list"
            return
        for i, item in enumerate(value):
            yield from problems(item, expected[0], f"{where}[{i}]")
    elif isinstance(expected, Mapping):
        yield from field_problems(value, expected, where)
    elif not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        yield f"{where}: {value!r} is not {expected.__name__}"


def field_problems(value: Any, expected: Mapping[str, Any], where: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{where}: {value!r} has no fields"
        return
    fields = {name.rstrip("*"): kind for name, kind in expected.items()}
    for name in (name.rstrip("*") for name in expected if name.endswith("*")):
        if name not in value:
            yield f"{where}: {name} is missing"
    for name, item in value.items():
        kind = fields.get(name, fields.get(""))
        if kind is None:
            yield f"{where}: no field {name!r}"
        else:
            yield from problems(item, kind, f"{where}.{name}")


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return yaml.safe_load(MANIFEST.read_text())


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_every_field_of_the_manifest_is_one_of_kuberays(manifest):
    assert list(problems(manifest, RAY_JOB, "ray-job.yaml")) == []
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("minReplicas: 6", "minReplicas: six", r"workerGroupSpecs\[0\].minReplicas: 'six' is not int"),
        ("rayStartParams: {}", "rayParams: {}", "rayStartParams is missing"),
        ('num-cpus: "0"', "num-cpus: 0", "num-cpus: 0 is not str"),
        ("sizeLimit: 24Gi", "sizeLimit: 24 GB", "'24 GB' is not a quantity"),
        ("volumeMounts: [{name: shared, ", "volumeMounts: [{", r"volumeMounts\[0\]: name is missing"),
        ("shutdownAfterJobFinishes", "shutdownAfterFinish", "no field 'shutdownAfterFinish'"),
    ],
)
def test_a_manifest_that_kuberay_refuses_is_reported(old, new, message):
    text = MANIFEST.read_text()
    assert old in text
    messages = list(problems(yaml.safe_load(text.replace(old, new)), RAY_JOB, "spec"))
    assert any(re.search(message, problem) for problem in messages), messages


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
