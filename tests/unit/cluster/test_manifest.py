"""The files of docs/guides/cluster.md: syntax, mounts, and the GPUs that their command asks for."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from furlong.config.command_line import parse
from furlong.config.topology import Topology

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "cluster"
MANIFEST, SLURM, SKY = EXAMPLES / "ray-job.yaml", EXAMPLES / "slurm.sh", EXAMPLES / "sky.yaml"


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


def command_in(script: str, **variables: str) -> list[str]:
    """The flags of the `furlong train` command in a shell script."""
    text = script.partition("furlong train ")[2].replace("\\\n", " ").partition("\n")[0]
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    return [word for word in shlex.split(text.partition(' "$@"')[0]) if word != "&"]


def check_script(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_slurm_script_asks_for_the_gpus_of_its_command():
    script = SLURM.read_text()
    check_script(script)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.MULTILINE))
    config = parse(command_in(script, SHARED="/shared")).config
    assert Topology.of(config).num_gpus == int(options["nodes"]) * int(options["gpus-per-node"])
    assert options["ntasks-per-node"] == "1"  # one Ray process a machine
    assert config.checkpoint.save == config.checkpoint.load  # so a requeued job resumes


def test_the_skypilot_task_has_the_schema_of_one_and_the_gpus_of_its_command():
    task = yaml.safe_load(SKY.read_text())
    known = {"name": str, "num_nodes": int, "resources": dict, "workdir": str, "secrets": dict, "volumes": dict,
             "setup": str, "run": str}  # fmt: skip  # of SkyPilot 0.14
    assert {key: known.get(key) for key in task} == {key: type(value) for key, value in task.items()}
    for script in (task["setup"], task["run"]):
        check_script(script)
    config = parse(command_in(task["run"])).config
    [(_, gpus)] = [task["resources"]["accelerators"].split(":")]
    assert Topology.of(config).num_gpus == task["num_nodes"] * int(gpus)
    assert all(
        str(path).startswith(tuple(task["volumes"])) for path in (config.checkpoint.save, config.data.prompt_data)
    )
    assert task["secrets"] == {"FURLONG_API_KEY": None}


def test_images_copy_what_exists_and_install_known_extras():
    text = (ROOT / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE)
    assert [name for _, name in bases] == ["cpu", "cuda"]
    assert all(":" in base and not base.endswith(":latest") for base, _ in bases)
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert all((ROOT / name).exists() and f"!{name}" in allowed for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml", "src"} == copied
    extras = {extra for group in re.findall(r"\.\[([\w,]+)\]", text) for extra in group.split(",")}
    assert extras <= set(project["optional-dependencies"])
