"""The names of slime that furlong has: `module:attribute` of each, and what to do about the others."""

from __future__ import annotations

_SAMPLE = "furlong.core.sample"
_GENERATION, _REWARDS, _HTTP = "furlong.slime_api.generation", "furlong.slime_api.rewards", "furlong.slime_api.http"
_HELPERS, _MASKS, _ROLLOUTS = "furlong.slime_api.helpers", "furlong.slime_api.masks", "furlong.slime_api.rollouts"
_ADAPTERS = "furlong.slime_api.agent_adapters"
_HARNESSES = "coding_agents"  # of examples/coding_agent, if that folder is on PYTHONPATH
_FILTERS, _REPLAY = "furlong.rollout.filters", "furlong.rollout.replay"
HARNESS_NAMES = (
    *("ClaudeCodeHarness", "CodexHarness", "BaseHarness", "HarnessContext"),
    *("install_npm_cli", "install_node22", "run_agent"),
)

NAMES: dict[str, dict[str, str]] = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": {"Sample": f"{_SAMPLE}:Sample"},
    "slime.utils.http_utils": {
        name: f"{_HTTP}:{name}"
        for name in (
            "post",
            "get",
            "is_port_available",
            "find_available_port",
            "get_rollout_num_engines",
            "init_http_client",
        )
    },
    "slime.utils.misc": {
        "load_function": "furlong.core.user_functions:load_function",
        "SingletonMeta": f"{_HELPERS}:SingletonMeta",
        "group_by": f"{_HELPERS}:group_by",
    },
    "slime.utils.async_utils": {"run": f"{_HELPERS}:run"},
    "slime.utils.processing_utils": {
        "load_tokenizer": f"{_HELPERS}:load_tokenizer",
        "load_processor": f"{_HELPERS}:load_processor",
    },
    "slime.utils.mask_utils": {
        "MultiTurnLossMaskGenerator": f"{_MASKS}:MultiTurnLossMaskGenerator",
        "get_response_lengths": f"{_MASKS}:get_response_lengths",
    },
    "slime.observability": {},
    "slime.observability.trace_utils": {
        name: f"{_HELPERS}:{name}" for name in ("trace_function", "trace_span", "build_sglang_meta_trace_attrs")
    },
    "slime.agent": {},
    "slime.agent.adapters": {
        "AnthropicAdapter": f"{_ADAPTERS}:AnthropicAdapter",
        "OpenAIAdapter": f"{_ADAPTERS}:OpenAIAdapter",
    },
    "slime.agent.adapters.anthropic": {"AnthropicAdapter": f"{_ADAPTERS}:AnthropicAdapter"},
    "slime.agent.adapters.openai": {"OpenAIAdapter": f"{_ADAPTERS}:OpenAIAdapter"},
    "slime.agent.adapters.common": {"flatten_content": f"{_ADAPTERS}:flatten_content"},
    "slime.agent.aiohttp_threaded": {
        name: f"{_ADAPTERS}:{name}" for name in ("run_app_in_thread", "AppHandle", "FilteredAccessLogger")
    },
    "slime.agent.harness": {name: f"{_HARNESSES}:{name}" for name in HARNESS_NAMES[:4]},
    "slime.agent.harness.common": {name: f"{_HARNESSES}:{name}" for name in HARNESS_NAMES[2:]},
    "slime.agent.sandbox": {
        "Sandbox": f"{_HARNESSES}:AgentSandbox",
        "E2BSandbox": f"{_HARNESSES}:E2BAgentSandbox",
        **{
            name: f"{_HARNESSES}:{name}" for name in ("exec_and_wait", "ensure_agent_user", "EXIT_TIME_BUDGET_EXCEEDED")
        },
    },
    "slime.rollout": {},
    "slime.rollout.base_types": {
        "RolloutFnTrainOutput": f"{_REPLAY}:RolloutFnTrainOutput",
        "RolloutFnEvalOutput": f"{_REPLAY}:RolloutFnEvalOutput",
        "call_rollout_fn": f"{_ROLLOUTS}:call_rollout_fn",
    },
    "slime.rollout.sglang_rollout": {
        **{
            name: f"{_GENERATION}:{name}"
            for name in ("GenerateState", "get_model_url", "generate", "generate_and_rm", "generate_and_rm_group")
        },
    },
    "slime.rollout.data_source": {
        "pop_first": f"{_ROLLOUTS}:pop_first",
    },
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {
        "DynamicFilterOutput": f"{_FILTERS}:DynamicFilterOutput",
        "call_dynamic_filter": f"{_ROLLOUTS}:call_dynamic_filter",
    },
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        name: f"{_FILTERS}:{name}" for name in ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback")
    },
    "slime.rollout.rm_hub": {
        "async_rm": f"{_REWARDS}:async_rm",
        "batched_async_rm": f"{_REWARDS}:batched_async_rm",
        "grade_answer_verl": f"{_REWARDS}:grade_answer_verl",
        "extract_boxed_answer": f"{_REWARDS}:extract_answer",
        "get_deepscaler_rule_based_reward": f"{_REWARDS}:deepscaler_reward",
        "compute_score_dapo": f"{_REWARDS}:dapo_compute_score",
        "f1_score": f"{_REWARDS}:f1_scores",
        "compute_gpqa_reward": f"{_REWARDS}:gpqa_reward",
    },
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": f"{_REWARDS}:dapo_compute_score"},
    "slime.rollout.rm_hub.math_utils": {
        "extract_answer": f"{_REWARDS}:extract_answer",
        "extract_boxed_answer": f"{_REWARDS}:extract_answer",
        "grade_answer_verl": f"{_REWARDS}:grade_answer_verl",
        "last_boxed_only_string": f"{_REWARDS}:last_boxed_only_string",
    },
    "slime.rollout.rm_hub.deepscaler": {"get_deepscaler_rule_based_reward": f"{_REWARDS}:deepscaler_reward"},
    "slime.rollout.rm_hub.f1": {"f1_score": f"{_REWARDS}:f1_scores"},
    "slime.rollout.rm_hub.ifbench": {"compute_ifbench_reward": f"{_REWARDS}:ifbench_reward"},
    "slime.rollout.rm_hub.gpqa": {"compute_gpqa_reward": f"{_REWARDS}:gpqa_reward"},
    "slime.backends": {},
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.cp_utils": {
        name: f"{_HELPERS}:{name}" for name in ("all_gather_with_cp", "slice_log_prob_with_cp")
    },
}

_MAP = "docs/guides/from-slime.md lists the names that exist"
_VALUE = "it is only a value of"
_SOURCE = "write a class with the methods in docs/reference/hooks.md, without a base class"
_IMAGES = "images, audio and video are not supported; train on text"
_EXAMPLE = "put examples/coding_agent of furlong's repository on PYTHONPATH: its coding_agents.py has these names"
_REMEDIES = {  # by module or `module:name`; the longest prefix counts
    "slime.agent": "write the agent as a generate function with furlong.agent.policy() or session() "
    "(docs/guides/agents.md)",
    "slime.agent.harness": _EXAMPLE,
    "slime.agent.sandbox": _EXAMPLE,
    "slime.utils.external_utils": "start runs with `furlong train` or furlong.train(); nothing else is needed",
    "slime.utils.misc:exec_command": "use subprocess.run",
    "slime.utils.misc": f"copy the helper into your module; {_MAP}",
    "slime.utils.processing_utils": _IMAGES,
    "slime.utils.types:MultimodalTypes": _IMAGES,
    "slime.utils.arguments": "flags are parsed by furlong; functions receive them as `args`",
    "slime.rollout.on_policy_distillation": "on-policy distillation is not supported; remove its functions and flags",
    "slime.rollout.sglang_streaming_rollout": "remove the flag: generation is furlong's own",
    "slime.rollout.sglang_rollout:generate_rollout": f"{_VALUE} --rollout-function-path and --eval-function-path; in a "
    "function use generate_and_rm_group",
    "slime.rollout.sft_rollout": f"{_VALUE} --rollout-function-path",
    "slime.rollout.fully_async_rollout": f"{_VALUE} --rollout-function-path; in a function use generate_and_rm_group",
    "slime.rollout.data_source": f"its classes are only values of --data-source-path; {_SOURCE}",
    "slime.rollout.sleep_rollout": "run `furlong serve` to start an engine without training",
    "slime.rollout.forge_load": "remove the flag; benchmarks/ measures engines",
    "slime.backends": "engines and trainers are furlong's own; remove the import",
    "slime.ray": "processes are furlong's own; remove the import",
}


def remedy(module: str, name: str | None = None) -> str:
    """Return what to do about a module, or a name in one, that furlong does not have."""
    full = module if name is None else f"{module}:{name}"
    keys = [key for key in _REMEDIES if full == key or full.startswith((f"{key}.", f"{key}:"))]
    return _REMEDIES[max(keys, key=len)] if keys else f"use another one or move your code out of slime; {_MAP}"
