"""Paths of slime's own functions, and flags of Miles, select furlong's parts."""

from __future__ import annotations

import pytest

from furlong.config.command_line import examine, load
from furlong.config.named_parts import AGENTIC, DEMONSTRATIONS, FULLY_ASYNC, GENERATION
from furlong.config.resolve import AGENT_PATH
from furlong.errors import ConfigError


@pytest.fixture
def base(model, data):
    return ["--hf-checkpoint", model, "--prompt-data", data, "--num-rollout", "2", "--rollout-batch-size", "4"]


def argv(base, *more):
    return [str(word) for word in (*base, "--n-samples-per-prompt", "2", "--rm-type", "math", *more)]


def test_values_that_are_the_default_are_removed(base):
    words = ["--rollout-function-path", GENERATION, "--data-source-path"]
    words += ["slime.rollout.data_source.RolloutDataSourceWithBuffer"]
    words += ["--buffer-filter-path", "slime.rollout.data_source:pop_first"]
    resolved = load(argv(base, *words))
    rollout, data = resolved.config.rollout, resolved.config.data
    assert (rollout.rollout_function_path, data.data_source_path, data.buffer_filter_path) == (None, None, None)
    assert len(resolved.lines) == 3
    assert resolved.config == load(argv(base)).config


def test_fully_async_is_never_synchronous(base):
    for preset, more, ahead in [({}, [], 2), ({"async_buffer_size": 1}, [], 2), ({}, [3], 3)]:
        words = ["--rollout-function-path", FULLY_ASYNC, *(["--async-buffer-size", *more] if more else [])]
        resolved = load(argv(base, *words), preset=preset)
        assert resolved.config.rollout.async_buffer_size == ahead
        assert resolved.config.rollout.rollout_function_path is None
        assert f"--async-buffer-size {ahead}" in resolved.lines[0]


def test_corrections_of_slime_and_miles_are_modes(base):
    for module in ("slime.backends.megatron_utils.loss", "miles.backends.training_utils.loss_hub.corrections"):
        for name, mode in (("icepop_function", "mask"), ("vanilla_tis_function", "clip")):
            words = ["--use-tis", "--tis-clip-low", "0.5", "--custom-tis-function-path", f"{module}.{name}"]
            algo = load(argv(base, *words)).config.algo
            assert (algo.custom_tis_function_path, algo.tis_mode, algo.tis_clip_low) == (None, mode, 0.5)
    _, problems = examine(argv(base, *words, "--tis-mode", "mask"))
    assert any("--tis-mode mask differ; remove one" in problem for problem in problems)


def test_flags_of_miles_are_translated_or_have_no_effect(base):
    words = "--fully-async --max-weight-staleness 3 --pause-generation-mode retract --max-seq-len 200 --qkv-format bshd"
    words += " --use-session-server v2 --tito-model qwen3 --custom-agent-function-path agent.py:run --use-prometheus"
    words += " --custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate"
    words += " --fsdp-cpu-offload --use-dynamic-global-batch-size --sglang-tp-size 1"
    words += " --dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted"
    resolved, problems = examine(argv(base, *words.split()))
    config = resolved.config
    assert problems == []
    assert (config.rollout.async_buffer_size, config.rollout.max_token_staleness) == (2, 3)
    assert (config.sync.pause_mode, config.rollout.rollout_max_context_len) == ("hold", 200)
    assert config.session.agent_function_path == "agent.py:run"
    assert config.optim.optimizer_cpu_offload
    assert config.rollout.custom_generate_function_path == AGENT_PATH
    assert "--max-seq-len of Miles is --rollout-max-context-len 200" in resolved.lines
    assert any(line.startswith("--qkv-format has no effect: ") for line in resolved.lines)
    _, problems = examine(argv(base, *words.split(), "--strict-flags"))
    assert [problem.split()[0] for problem in problems] == [
        "--qkv-format", "--use-session-server", "--tito-model", "--use-prometheus", "--use-dynamic-global-batch-size",
        "--sglang-tp-size",
    ]  # fmt: skip
    for wrong in ("--pause-generation-mode stop", "--update-weight-transfer-mode p2p"):
        _, problems = examine(argv(base, *wrong.split()))
        assert [f"{wrong} is not supported; use " in problem for problem in problems] == [True]


def test_contradictions_are_errors(base):
    for words, problem in [
        (["--rollout-function-path", FULLY_ASYNC, "--async-buffer-size", "0"], "would be synchronous"),
        (["--custom-generate-function-path", AGENTIC.replace("slime", "miles")], "add --agent-function-path"),
        (["--rollout-function-path", DEMONSTRATIONS], "add --loss-type sft_loss"),
        (["--rollout-function-path", "mine.py:roll", "--eval-function-path", GENERATION], "evaluation=True"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            load(argv(base, *words))


def test_demonstrations_are_those_of_the_loss(model, data):
    words = ["--hf-checkpoint", model, "--prompt-data", data, "--label-key", "label", "--num-rollout", "2"]
    words += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "1", "--loss-type", "sft_loss"]
    resolved, problems = examine([str(w) for w in [*words, "--rollout-function-path", DEMONSTRATIONS]])
    assert problems == []
    assert resolved.config == examine([str(word) for word in words])[0].config
