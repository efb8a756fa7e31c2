"""Everything that is checked before a run: what `furlong doctor` reports, a run refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from furlong.catalogue import Diagnosis, Problem, diagnosis, most_severe_first
from furlong.cluster.ray_session import check_fits, cluster_nodes
from furlong.config.checks.engine_checks import device_problems
from furlong.config.command_line import Resolved
from furlong.config.facts import is_started, without_engines
from furlong.config.sections import Config
from furlong.config.topology import Topology, uses_ray
from furlong.diagnosis.preflight import preflight
from furlong.diagnosis.preflight.flag_checks import from_problem
from furlong.errors import ClusterError, ConfigError
from furlong.run.run_folder import folder_problems


def findings_before_run(resolved: Resolved, problems: Sequence[Problem] = ()) -> list[Diagnosis]:
    """Return the diagnoses of a command, most severe first. `problems` are those of reading its flags."""
    findings = preflight(resolved.config, [*problems, *folder_problems(resolved)])
    if any(finding.id == "GPU05" for finding in findings):  # there is no cluster to ask
        return findings
    return most_severe_first([*findings, *_cluster_findings(resolved.config)])


def _cluster_findings(config: Config) -> Iterator[Diagnosis]:
    """GPU05, GPU01 and CFG05: the cluster at --ray-address, its slots, and flags that depend on its machines."""
    address = config.cluster.ray_address
    if address is None or ":" not in address or not uses_ray(config):
        return  # `auto`: Ray looks for a cluster on this machine when the run starts
    try:
        nodes, resource = cluster_nodes(address)
    except ClusterError as error:
        finding, _, remedy = str(error).rpartition("; ")
        yield diagnosis("GPU05", finding, cause="", remedy=remedy, evidence={"address": address})
        return
    topology = Topology.of(config)
    try:
        check_fits(topology, nodes, resource)
    except ConfigError as error:
        finding, _, remedy = str(error).partition("; ")
        evidence = {"needed": topology.num_gpus, "nodes": [str(node) for node in nodes]}
        yield diagnosis("GPU01", finding, remedy=remedy, evidence=evidence)
    for problem in device_problems(config, "cuda" if resource == "GPU" else "cpu"):
        yield from_problem(problem, {"address": address})
    if is_started(config) and not without_engines(config):
        from furlong.inference.supervisor.launch import key_problem  # imports torch

        keys = (key_problem(config.cluster.sglang_api_key, "an engine", node.address) for node in nodes)
        if problem := next(filter(None, keys), None):
            yield from_problem(problem, {"address": address})
