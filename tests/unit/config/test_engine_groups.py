"""Engines that are not all alike: groups of a file, and prefill apart from decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from furlong.config.checks.engine_checks import engine_problems
from furlong.config.checks.validate import declared_problems
from furlong.config.command_line import parse
from furlong.config.engine_groups import (
    EngineGroup,
    engine_groups,
    engine_parts,
    served_models,
    trained_model,
)
from furlong.config.facts import gets_random_key
from furlong.config.topology import Topology

SPLIT = """
sglang:
  - name: default
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: prefill, num_gpus: 4}
      - {worker_type: placeholder, num_gpus: 2}
      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 4, overrides: {mem-fraction-static: 0.85, pp_size: 2}}
"""


def config_of(folder: Path, text: str, *words: str) -> Any:
    path = folder / "engines.yaml"
    path.write_text(text)
    return parse(["--engine", "sglang", "--sglang-config", str(path), *words]).config


def test_groups_get_gpus_in_their_order_and_the_run_counts_all_of_them(tmp_path):
    config = config_of(tmp_path, SPLIT, "--actor-num-gpus-per-node", "8", "--update-weight-transport", "disk")
    assert list(engine_problems(config)) == []
    assert config.engines.sglang_router_strategy == "cache_aware"
    prefill, _, decode = engine_groups(config)
    assert prefill == EngineGroup("prefill", 4, 2)
    assert decode.options == {"mem_fraction_static": 0.85, "pp_size": 2}
    places = [(part.group.role, part.first_gpu, part.num_gpus) for part in engine_parts(engine_groups(config))]
    assert places == [("prefill", 0, 2), ("prefill", 2, 2), ("decode", 6, 4)]
    topology = Topology.of(config)
    assert (topology.num_gpus, topology.num_engines) == (18, 3)
    assert topology.engine_parts == ((0, 2), (2, 2), (6, 4))


def test_models_that_are_not_trained_have_a_folder_and_gpus_of_their_own(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    copy = JUDGE.format(f"{own}, update_weights: false").replace("judge", "ref").replace("num_gpus: 2", "num_gpus: 1")
    words = ("--hf-checkpoint", str(own), "--update-weight-transport", "disk")
    config = config_of(tmp_path, SPLIT + JUDGE.format(tmp_path) + copy, *words)
    assert list(engine_problems(config)) == []
    assert (config.engines.rollout_num_gpus, config.engines.sglang_router_strategy) == (13, "cache_aware")
    models = served_models(config)
    found = [(model.name, model.path, model.num_engines) for model in models]
    assert found == [("default", None, 3), ("judge", str(tmp_path), 2), ("ref", str(own), 1)]
    assert trained_model(config) == models[0]
    assert [part.first_gpu for part in engine_parts(engine_groups(config))] == [0, 2, 6, 10, 11, 12]


def test_the_servers_that_prefill_come_first_and_the_others_decode():
    words = ["--engine", "sglang", "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "2"]
    config = parse([*words, "--prefill-num-servers", "1"]).config
    assert engine_groups(config) == [EngineGroup("prefill", 2, 2), EngineGroup("decode", 6, 2)]
    [problem] = engine_problems(parse([*words, "--prefill-num-servers", "4"]).config)
    assert "leaves none of --rollout-num-gpus 8 for decoding" in problem


ONE = "worker_type: regular, num_gpus: 1"
JUDGE = "  - {{name: judge, model_path: {}, server_groups: [{{worker_type: regular, num_gpus: 2}}]}}\n"


def groups(*rows: str, more: str = "") -> str:
    lines = "".join(f"\n      - {{{row}}}" for row in rows)
    return f"sglang:\n  - name: default\n    server_groups:{lines}\n{more}"


def test_an_invalid_file_names_the_place_and_the_fix(tmp_path):
    for text, words, message in [
        ("sglang: 3", (), "write `sglang: [{name: ..., server_groups: [...]}]`"),
        (groups(ONE, more="  - {name: judge, model_path: /no}\n"), (), "model judge: no `server_groups`"),
        (groups(ONE, more=JUDGE.format("/no/such")), (), "model judge: model_path /no/such: no such directory"),
        (groups(ONE, more=JUDGE.format("x, update_weights: true")), (), "but the trained model is --hf-checkpoint"),
        (groups(ONE, more=JUDGE.format("null, update_weights: false")), (), "without a `model_path`"),
        (groups(ONE, more=JUDGE.format("null")), (), "2 are trained: default, judge"),
        (groups(ONE, more=JUDGE.format("src").replace("judge", "default")), (), "two models are named 'default'"),
        (groups(ONE, more=JUDGE.format("src")), ("--sglang-router-strategy", "direct"), "through its router"),
        (groups(ONE, more=JUDGE.format("src")), ("--colocate",), "--colocate"),
        (groups("worker_type: placeholder, num_gpus: 1"), (), "no group has an engine"),
        (groups("worker_type: prefill, num_gpus: 1"), (), "prefill and decode need each other"),
        (groups("worker_type: encoder, num_gpus: 1"), (), "worker_type 'encoder'"),
        (groups("worker_type: regular, num_gpus: 0"), (), "group 0: num_gpus 0, expected a positive number"),
        (groups("worker_type: regular, num_gpus: 3, num_gpus_per_engine: 2"), (), "3 is not a multiple of"),
        (groups("worker_type: regular, num_gpu: 3"), (), "group 0: unknown key 'num_gpu'"),
        (
            groups("worker_type: regular, num_gpus: 1, overrides: {tp_size: 2}"),
            (),
            "override tp_size is set by furlong",
        ),
        (groups("worker_type: regular, num_gpus: 1, overrides: {mem_fractoin: 2}"), (), "is not an option of sglang"),
        (groups("worker_type: regular, num_gpus: 1, overrides: {disaggregation_mode: decode}"), (), "use worker_type"),
        (groups("worker_type: regular, num_gpus: 2"), ("--rollout-num-gpus", "4"), "--rollout-num-gpus is 4"),
        (SPLIT, (), "model default: pp-size 2 with --update-weight-transport nccl: SGLang's pipeline stages"),
        (SPLIT, ("--sglang-dp-size", "2"), "model default: dp-size 2 would create replicas of the model"),
        (SPLIT, ("--sglang-router-strategy", "direct"), "--sglang-router-strategy direct"),
        (SPLIT, ("--engine", "embedded"), "which the embedded engine does not"),
        (SPLIT, ("--prefill-num-servers", "1"), "--prefill-num-servers 1 and --sglang-config"),
        (SPLIT, ("--engine", "external"), "has no effect with --engine external; remove --sglang-config"),
    ]:
        config = config_of(tmp_path, text, *words)
        assert [problem for problem in (*declared_problems(config), *engine_problems(config)) if message in problem]


def test_an_engine_is_cut_in_ways_in_which_it_gets_weights():
    for words, problem in [
        ("--sglang-pp-size 3", "--sglang-pp-size 3 does not divide the 4 GPUs of an engine"),
        ("--sglang-pp-size 2", "--sglang-pp-size 2 with --update-weight-transport nccl"),
        ("--sglang-pp-size 2 --update-weight-transport disk", ""),
        ("--sglang-dp-size 2", "--sglang-dp-size 2 would create replicas of the model"),
        ("--sglang-dp-size 3 --sglang-enable-dp-attention", "--sglang-dp-size 3 does not divide the 4 tensor-parallel"),
        ("--sglang-dp-size 4 --sglang-enable-dp-attention --sglang-ep-size 4", ""),
        (
            "--sglang-speculative-algorithm NGRAM --update-weight-transport disk",
            "--sglang-speculative-algorithm NGRAM with --update-weight-transport disk",
        ),
        ("--sglang-speculative-algorithm NGRAM --update-weight-transport nccl", ""),
        ("--sglang-speculative-algorithm NGRAM --update-weight-transport disk --debug-rollout-only", ""),
        ("--sglang-tokenizer-worker-num 4", "--sglang-tokenizer-worker-num 4: "),
        ("--sglang-tokenizer-worker-num 4 --debug-rollout-only", ""),
    ]:
        argv = ["--engine", "sglang", "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "4", *words.split()]
        found = list(engine_problems(parse(argv).config))
        assert len(found) == bool(problem), found
        assert all(text.startswith(problem) for text in found), found


def test_engines_that_the_run_starts_have_a_random_key_unless_functions_could_not_reach_a_frozen_model(tmp_path):
    frozen = """  - name: judge
    model_path: /judge
    server_groups: [{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}]
"""
    assert gets_random_key(config_of(tmp_path, SPLIT))
    assert gets_random_key(parse(["--engine", "sglang", "--rollout-num-gpus", "2"]).config)
    assert not gets_random_key(config_of(tmp_path, SPLIT, "--sglang-api-key", "own"))
    assert not gets_random_key(config_of(tmp_path, SPLIT + frozen))
