"""Options of SGLang and sglang-router as flags: checked, refused, written down and read again."""

from __future__ import annotations

import json

import pytest

from furlong.config.command_line import argv_from_config, parse
from furlong.config.passthrough import REFUSED, OptionList
from furlong.errors import ConfigError
from furlong.inference.supervisor.launch import argv_from_options

WORDS = [
    "--sglang-attention-backend", "fa3", "--sglang-disable-cuda-graph", "--sglang-mem-fraction-static=0.6",
    "--sglang-cuda-graph-bs", "1", "2", "--sglang-pipeline-parallel-size", "2", "--router-cache-threshold", "0.5",
]  # fmt: skip
SGLANG = {
    "attention_backend": "fa3", "disable_cuda_graph": True, "mem_fraction_static": 0.6, "cuda_graph_bs": ["1", "2"],
    "pp_size": 2,
}  # fmt: skip


def test_options_are_read_by_their_type_under_their_own_name():
    engines = parse(WORDS).config.engines
    assert engines.sglang_options == SGLANG
    assert (engines.router_options, engines.sglang_router_strategy) == ({"cache_threshold": 0.5}, "cache_aware")


def test_options_survive_the_command_line_and_config_json():
    resolved = parse(WORDS)
    assert parse(argv_from_config(resolved.config)).config.engines == resolved.config.engines
    assert json.loads(resolved.to_json())["config"]["engines"]["sglang_options"] == SGLANG


def test_file_sets_options_and_flags_override_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("sglang-attention-backend: triton\nengines:\n  sglang_disable_radix_cache: true\n")
    options = parse(["--config", str(path), "--sglang-attention-backend", "fa3"]).config.engines.sglang_options
    assert options == {"attention_backend": "fa3", "disable_radix_cache": True}


def test_an_invalid_option_names_the_fix():
    for words, message in [
        (
            ["--sglang-atention-backend", "fa3"],
            "is not an option of sglang 0.5.16; did you mean --sglang-attention-backend",
        ),
        (
            ["--sglang-tp-size", "2"],
            "--sglang-tp-size 2 differs from --rollout-num-gpus-per-engine 1, which sets it; remove it",
        ),
        (["--sglang-tensor-parallel-size", "2"], "is set by furlong; use --rollout-num-gpus-per-engine"),
        (["--sglang-trust-remote-code"], "is set by furlong; remove it"),
        (["--router-policy", "random"], "--router-policy is set by furlong; use --sglang-router-strategy"),
        (["--router-pd-disaggregation"], "is set by furlong; use worker_type in --sglang-config, or --prefill-num-se"),
        (
            ["--sglang-admin-api-key", "x"],
            "is not accepted: furlong controls its servers with one key, --sglang-api-key",
        ),
        (["--sglang-ssl-keyfile-password", "x"], "is not accepted: furlong talks plain HTTP"),
        (["--sglang-smg-grpc-mode"], "is not accepted: furlong talks plain HTTP"),
        (["--router-control-plane-api-keys", "a:b:admin:x"], "is not accepted: furlong controls its servers with one"),
        (["--router-service-discovery"], "is not accepted: the workers"),
        (["--router-oracle-password", "x"], "is not accepted: it is for /v1/responses"),
        (["--sglang-mem-fraction-static", "x"], "got 'x', expected a number"),
        (["--sglang-mem-fraction-static"], "has no value, expected a number"),
        (["--sglang-disable-cuda-graph", "1"], "takes no value, got '1'"),
        (["--sglang-no-dllm-fdfo", "1"], "takes no value, got '1'"),
        (["--sglang-attention-backend", "fa33"], "got 'fa33', expected one of aiter, ascend, .* fa3, "),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse(words)


def test_a_wrong_value_in_a_file_names_the_key(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("sglang_mem_fraction_static: yes\n")
    with pytest.raises(ConfigError, match=r"sglang_mem_fraction_static got True, expected a number"):
        parse(["--config", str(path)])
    path.write_text("sglang_dllm_fdfo: false\n")  # left out it would be on
    with pytest.raises(ConfigError, match=r"got False, expected true; use no-dllm-fdfo"):
        parse(["--config", str(path)])
    path.write_text("sglang_no_dllm_fdfo: true\nsglang_lora_strict_loading: true\n")
    options = parse(["--config", str(path)]).config.engines.sglang_options
    assert argv_from_options(options) == ["--no-dllm-fdfo", "--lora-strict-loading"]


def test_everything_refused_is_an_option():
    for program, start in [
        (p, start) for p, rows in REFUSED.items() for starts in rows.values() for start in starts.split()
    ]:
        assert any(name.startswith(start) for name in OptionList.of(program).options)


def test_the_shipped_lists_have_what_runs_need():
    assert {"context-length", "dtype", "served-model-name", "ep-size"} <= set(OptionList.of("sglang").options)
    assert OptionList.of("router").options["policy"].choices


def test_names_that_another_version_may_have_are_passed_on(monkeypatch):
    monkeypatch.setattr("furlong.config.passthrough.installed_version", lambda package: "0.9.0")
    options = parse(["--sglang-new-thing", "3", "--sglang-attention-backend", "new"]).config.engines.sglang_options
    assert options == {"new_thing": "3", "attention_backend": "new"}
