"""The names of slime and Miles that furlong has: `module:attribute` of each, and what to do about the others."""

from __future__ import annotations

_API, _EXAMPLE_MODULE = "furlong.slime_api", "coding_agents"  # the latter if examples/coding_agent is on PYTHONPATH
_FILTERS, _REPLAY = "furlong.rollout.filters", "furlong.rollout.replay"
_ADAPTERS = "AnthropicAdapter OpenAIAdapter"

# Module of slime, module here, and the names that it has; `name=other` is `other` here. `miles` has the same modules.
_ROWS = (
    ("slime.utils.types", "furlong.core.sample", "Sample"),
    ("slime.utils.http_utils", f"{_API}.http", "post get is_port_available find_available_port"),
    ("slime.utils.http_utils", f"{_API}.http", "get_rollout_num_engines init_http_client"),
    ("slime.utils.misc", "furlong.core.user_functions", "load_function"),
    ("slime.utils.misc", f"{_API}.helpers", "SingletonMeta group_by"),
    ("slime.utils.async_utils", f"{_API}.helpers", "run"),
    ("slime.utils.processing_utils", f"{_API}.helpers", "load_tokenizer load_processor"),
    ("slime.utils.processing_utils", f"{_API}.helpers", "encode_image_for_rollout_engine"),
    ("slime.utils.mask_utils", f"{_API}.masks", "MultiTurnLossMaskGenerator get_response_lengths"),
    ("slime.observability.trace_utils", f"{_API}.helpers", "trace_function trace_span build_sglang_meta_trace_attrs"),
    ("slime.agent.adapters", f"{_API}.agent_adapters", _ADAPTERS),
    ("slime.agent.adapters.anthropic", f"{_API}.agent_adapters", "AnthropicAdapter"),
    ("slime.agent.adapters.openai", f"{_API}.agent_adapters", "OpenAIAdapter"),
    ("slime.agent.adapters.common", f"{_API}.agent_adapters", "flatten_content"),
    ("slime.agent.aiohttp_threaded", f"{_API}.agent_adapters", "run_app_in_thread AppHandle FilteredAccessLogger"),
    ("slime.agent.harness", _EXAMPLE_MODULE, "ClaudeCodeHarness CodexHarness BaseHarness HarnessContext"),
    ("slime.agent.harness.common", _EXAMPLE_MODULE, "BaseHarness HarnessContext"),
    ("slime.agent.harness.common", _EXAMPLE_MODULE, "install_npm_cli install_node22 run_agent"),
    ("slime.agent.sandbox", _EXAMPLE_MODULE, "Sandbox=AgentSandbox E2BSandbox=E2BAgentSandbox"),
    ("slime.agent.sandbox", _EXAMPLE_MODULE, "exec_and_wait ensure_agent_user EXIT_TIME_BUDGET_EXCEEDED"),
    ("slime.rollout.base_types", _REPLAY, "RolloutFnTrainOutput RolloutFnEvalOutput"),
    ("slime.rollout.base_types", f"{_API}.rollouts", "call_rollout_fn"),
    ("slime.rollout.sglang_rollout", f"{_API}.generation", "GenerateState get_model_url"),
    ("slime.rollout.sglang_rollout", f"{_API}.generation", "generate generate_and_rm generate_and_rm_group"),
    ("slime.rollout.on_policy_distillation", f"{_API}.distillation", "reward_func post_process_rewards"),
    ("slime.rollout.data_source", f"{_API}.rollouts", "DataSource pop_first"),
    ("slime.rollout.filter_hub.base_types", _FILTERS, "DynamicFilterOutput"),
    ("slime.rollout.filter_hub.base_types", f"{_API}.rollouts", "call_dynamic_filter"),
    ("slime.rollout.filter_hub.dynamic_sampling_filters", _FILTERS, "check_reward_nonzero_std"),
    ("slime.rollout.filter_hub.dynamic_sampling_filters", _FILTERS, "check_reward_nonzero_std_with_fallback"),
    ("slime.rollout.rm_hub", f"{_API}.rewards", "async_rm batched_async_rm grade_answer_verl"),
    ("slime.rollout.rm_hub", f"{_API}.rewards", "extract_boxed_answer=extract_answer f1_score=f1_scores"),
    ("slime.rollout.rm_hub", f"{_API}.rewards", "get_deepscaler_rule_based_reward=deepscaler_reward"),
    (
        "slime.rollout.rm_hub",
        f"{_API}.rewards",
        "compute_score_dapo=dapo_compute_score compute_gpqa_reward=gpqa_reward",
    ),
    ("slime.rollout.rm_hub.math_dapo_utils", f"{_API}.rewards", "compute_score=dapo_compute_score"),
    ("slime.rollout.rm_hub.math_utils", f"{_API}.rewards", "extract_answer extract_boxed_answer=extract_answer"),
    ("slime.rollout.rm_hub.math_utils", f"{_API}.rewards", "grade_answer_verl last_boxed_only_string"),
    ("slime.rollout.rm_hub.deepscaler", f"{_API}.rewards", "get_deepscaler_rule_based_reward=deepscaler_reward"),
    ("slime.rollout.rm_hub.f1", f"{_API}.rewards", "f1_score=f1_scores"),
    ("slime.rollout.rm_hub.ifbench", f"{_API}.rewards", "compute_ifbench_reward=ifbench_reward"),
    ("slime.rollout.rm_hub.gpqa", f"{_API}.rewards", "compute_gpqa_reward=gpqa_reward"),
    ("slime.backends.megatron_utils.cp_utils", f"{_API}.helpers", "all_gather_with_cp slice_log_prob_with_cp"),
    ("slime.backends.megatron_utils.loss", f"{_API}.helpers", "get_log_probs_and_entropy"),
)
_LOSSES = "miles.backends.training_utils.loss_hub"
_MILES_ROWS = (  # modules that only Miles has
    (f"{_LOSSES}.logit_processors", f"{_API}.helpers", "get_log_probs_and_entropy"),
    ("miles.rollout.base_types", "furlong.rollout.user_samples", "GenerateFnInput GenerateFnOutput"),
    ("miles.rollout.generate_hub.single_turn", f"{_API}.generation", "generate=generate_single_turn"),
    ("miles.rollout.filter_hub.dynamic_sampling_filters", _FILTERS, "check_no_aborted"),
    ("miles.backends.training_utils.cp_utils", f"{_API}.helpers", "all_gather_with_cp slice_log_prob_with_cp"),
)
NAMES: dict[str, dict[str, str]] = {}
for _module, _home, _names in (*_ROWS, *((f"miles{row[0][5:]}", *row[1:]) for row in _ROWS), *_MILES_ROWS):
    for _end in [i for i, letter in enumerate(_module) if letter == "."]:
        NAMES.setdefault(_module[:_end], {})  # packages
    for _name in _names.split():
        _theirs, _, _ours = _name.partition("=")
        NAMES.setdefault(_module, {})[_theirs] = f"{_home}:{_ours or _theirs}"

_MAP = "docs/reference/slime.md lists the names that exist"
_NO_CLASS = "write the rollout function as a function of (args, rollout_id, data_source, evaluation), not as a class"
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
    "slime.rollout.sglang_streaming_rollout": "remove the flag: generation is furlong's own",
    "slime.rollout.sglang_rollout:generate_rollout": f"{_VALUE} --rollout-function-path and --eval-function-path; in a "
    "function use generate_and_rm_group",
    "slime.rollout.sft_rollout": f"{_VALUE} --rollout-function-path",
    "slime.rollout.fully_async_rollout": f"{_VALUE} --rollout-function-path; in a function use generate_and_rm_group",
    "slime.rollout.data_source": f"its other classes are only values of --data-source-path; {_SOURCE}",
    "slime.rollout.base_types": _NO_CLASS,
    "slime.rollout.inference_rollout": f"{_NO_CLASS}, or remove the flag: generation is furlong's own",
    "slime.rollout.checkpoint_eval": "remove the flag: the rollout engines also evaluate",
    "slime.rollout.generate_hub": "write an agent with a loop and tools of its own for --agent-function-path",
    "slime.rollout.generate_utils": "post to args.sglang_router_ip, or use generate of slime.rollout.sglang_rollout",
    "slime.rollout.sleep_rollout": "run `furlong serve` to start an engine without training",
    "slime.rollout.forge_load": "remove the flag; benchmarks/ measures engines",
    "slime.backends.megatron_utils.loss": "its corrections are values of --custom-tis-function-path, or --tis-mode "
    "mask (IcePop) and clip; its losses are those of --loss-type; get_log_probs_and_entropy exists",
    "slime.backends": "engines and trainers are furlong's own; remove the import",
    "slime.ray": "processes are furlong's own; remove the import",
}


def remedy(module: str, name: str | None = None) -> str:
    """Return what to do about a module, or a name in one, that furlong does not have."""
    full = f"slime{module[5:]}" + ("" if name is None else f":{name}")  # `miles` has as many letters
    keys = [key for key in _REMEDIES if full == key or full.startswith((f"{key}.", f"{key}:"))]
    return _REMEDIES[max(keys, key=len)] if keys else f"use another one or move your code out of {module[:5]}; {_MAP}"
