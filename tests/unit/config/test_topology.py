"""Number of GPUs that a run needs, and the problems reported when there are too few."""

from __future__ import annotations

from furlong.config import Config
from furlong.config.checks.training_checks import parallel_problems
from furlong.config.checks.validate import declared_problems
from furlong.config.command_line import config_from_json, config_from_values, config_to_json, parse
from furlong.config.topology import Topology, uses_ray

CASES = [
    (Topology(), 1, "1"),
    (Topology(num_nodes=1, gpus_per_node=8), 8, "8"),
    (Topology(num_nodes=4, gpus_per_node=8), 32, "4 x 8 = 32"),
    (Topology(num_nodes=4, gpus_per_node=8, num_engine_gpus=16), 48, "4 x 8 + 16 = 48"),
    (Topology(num_nodes=4, gpus_per_node=8, num_engine_gpus=16, is_colocated=True), 32, "max(4 x 8, 16) = 32"),
    (Topology(num_nodes=1, gpus_per_node=4, num_engine_gpus=8, is_colocated=True), 8, "max(4, 8) = 8"),
    (Topology(num_nodes=0, num_engine_gpus=16, gpus_per_engine=8), 16, "16"),
]


def test_gpus_add_up_as_in_slime():
    for topology, num_gpus, text in CASES:
        assert (topology.num_gpus, topology.sum) == (num_gpus, text)


def test_engines_come_after_the_trainer_unless_they_share_its_gpus():
    apart = Topology(num_nodes=2, gpus_per_node=4, num_engine_gpus=8, gpus_per_engine=2)
    together = Topology(num_nodes=2, gpus_per_node=4, num_engine_gpus=8, gpus_per_engine=2, is_colocated=True)
    assert (apart.engine_offset, together.engine_offset, apart.num_engines) == (8, 0, 4)


def test_too_few_gpus_are_refused_with_the_sum_and_what_would_fit():
    topology = Topology(num_nodes=4, gpus_per_node=8, num_engine_gpus=16, gpus_per_engine=8)
    assert topology.shortage(48) == ""
    assert topology.shortage(32) == ("the run needs 4 x 8 + 16 = 48 GPUs, the cluster has 32; --colocate would need 32")
    assert "--rollout-num-gpus 8 would fit next to the trainer" in topology.shortage(40)
    assert "lower --actor-num-nodes" in Topology(num_nodes=4, gpus_per_node=8).shortage(31)


def test_one_process_needs_no_ray():
    for values, expected in [
        ({}, False),
        ({"actor_num_gpus_per_node": 2}, True),
        ({"actor_num_nodes": 2}, True),
        ({"ray_address": "auto"}, True),
        ({"actor_num_gpus_per_node": 2, "debug_rollout_only": True}, False),
        ({"engine": "embedded", "rollout_num_gpus": 2}, False),  # servers on this machine
        ({"engine": "embedded", "rollout_num_gpus": 1, "colocate": True}, False),  # on the one that trains
        ({"engine": "embedded", "actor_num_gpus_per_node": 2, "colocate": True}, True),
    ]:
        assert uses_ray(config_from_values(values)) is expected


def test_a_configuration_reaches_a_rank_unchanged():
    config = config_from_values(
        {"rollout_stop": ("a", "b"), "train_env_vars": {"A": "1"}, "lr": 0.5, "eval_prompt_data": None}
    )
    assert config_from_json(config_to_json(config)) == config
    assert config_from_json(config_to_json(Config())) == Config()


def test_engines_that_share_the_trainers_gpus_are_as_many_by_default():
    words = ["--colocate", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--num-gpus-per-node", "4"]
    config = parse(words).config
    assert (config.engines.rollout_num_gpus, config.sync.update_weight_transport) == (8, "ipc")
    assert Topology.of(config).sum == "max(2 x 4, 8) = 8"


def test_sglang_shares_the_only_training_gpu_unless_flags_place_it_elsewhere():
    for words, is_colocated in [
        ([], True),
        (["--rollout-num-gpus", "1"], False),
        (["--actor-num-gpus-per-node", "2"], False),
        (["--async-buffer-size", "1"], False),
        (["--debug-rollout-only"], False),
        (["--rollout-external-engine-addrs", "a:1"], False),
    ]:
        resolved = parse(["--engine", "sglang", *words])
        assert resolved.config.cluster.colocate is is_colocated
        if is_colocated:
            assert (resolved.config.engines.rollout_num_gpus, resolved.config.sync.update_weight_transport) == (
                1,
                "ipc",
            )
            assert resolved.config.cluster.offload_train


def test_colocated_roles_offload_memory_unless_disabled():
    for words, offloads in [
        (["--colocate"], (True, True)),
        (["--colocate", "--no-offload-train"], (False, True)),
        (["--colocate", "--no-offload-rollout"], (True, False)),
        (["--colocate", "--debug-rollout-only"], (False, False)),
        (["--rollout-num-gpus", "1"], (False, False)),
    ]:
        cluster = parse(words).config.cluster
        assert (cluster.offload_train, cluster.offload_rollout) == offloads


def test_the_cluster_of_the_environment_is_used_by_runs_that_place_something(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert parse(["--rollout-num-gpus", "2"]).config.cluster.ray_address == "10.0.0.1:6379"
    assert parse(["--lr", "1"]).config.cluster.ray_address is None


def test_the_key_of_servers_may_be_in_the_environment(monkeypatch):
    monkeypatch.setenv("FURLONG_API_KEY", "a secret")
    resolved = parse(["--rollout-num-gpus", "2"])
    assert resolved.config.cluster.sglang_api_key == "a secret"
    assert "a secret" not in resolved.to_json()
    assert resolved.sources["sglang_api_key"] == "derived: FURLONG_API_KEY"
    assert parse(["--rollout-external-engine-addrs", "a:1"]).config.cluster.sglang_api_key == "a secret"
    assert parse(["--rollout-num-gpus", "2", "--sglang-api-key", "b"]).config.cluster.sglang_api_key == "b"
    assert parse(["--lr", "1"]).config.cluster.sglang_api_key is None, "no server wants it"


def test_flags_of_one_training_backend_and_sizes_that_do_not_fit_are_refused():
    for flags, said in [
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2 ... --train-backend megatron"),
        ({"train_backend": "megatron", "compile_layers": "on"}, "--compile-layers on ... --train-backend fsdp"),
        ({"train_backend": "megatron", "pipeline_model_parallel_size": 3}, "does not divide the 4 training processes"),
        (
            {"train_backend": "megatron", "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
            "4 x --pipeline-model-parallel-size 2 x --context-parallel-size 1 = 8 does not divide the 4",
        ),
        (
            {"train_backend": "megatron", "expert_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
            "does not divide the 2 training processes of a pipeline stage; use --expert-model-parallel-size 2",
        ),
        (
            {"train_backend": "megatron", "expert_model_parallel_size": 4, "tensor_model_parallel_size": 2},
            "4 x --expert-tensor-parallel-size 2, which follows --tensor-model-parallel-size = 8 does not divide the 4 "
            "training processes of a pipeline stage; use --expert-tensor-parallel-size 1",
        ),
        ({"train_backend": "megatron", "recompute_granularity": "full"}, "full needs --recompute-method"),
        ({"train_backend": "megatron", "recompute_granularity": "selective"}, "--recompute-modules is not given"),
        (
            {"train_backend": "megatron", "recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            "has layernorm; choose from mlp, moe, shared_experts",
        ),
    ]:
        config = config_from_values({"actor_num_gpus_per_node": 4, **flags})
        problems = [*declared_problems(config), *parallel_problems(config)]
        assert any(all(word in problem for word in said.split(" ... ")) for problem in problems), problems
