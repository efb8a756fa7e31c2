"""Builds the data source, the rollout with its rewards, agents and sessions, and what `furlong eval` drives."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from furlong.chat.messages import KeyFunction, key_of
from furlong.chat.parsers import PARSERS, ToolParser
from furlong.chat.template_boundary import ChatFormat
from furlong.config.args_view import Args, get_model_url
from furlong.config.command_line import config_from_values
from furlong.config.engine_groups import engine_parts, trained_model
from furlong.config.environment_specs import parse_env_workers, parse_environments
from furlong.config.evaluation import EvalSpec
from furlong.config.facts import is_started, is_unscored, max_staleness, returns_routes, routing_of, shares_groups
from furlong.config.hooks import Hooks, usable_hooks
from furlong.config.sections import Config, RolloutFlags, SessionFlags
from furlong.config.teachers import teacher_specs
from furlong.core.addresses import host_and_port
from furlong.core.process_environment import SESSIONS_KEY_VARIABLE
from furlong.core.sample import Group, Sample
from furlong.core.text import redact_credentials
from furlong.core.user_functions import load_function
from furlong.core.user_modules import import_module_of
from furlong.data.custom_source import CustomDataSource, EmptyDataSource, EmptyPrompts
from furlong.data.dataset import open_prompts
from furlong.data.ledger import FileLedger
from furlong.data.mixture import MixturePart, PromptMixture
from furlong.data.prompt import Prompt, PromptFormat
from furlong.data.source import Prompts, PromptTable, RolloutDataSource, group_from_prompt
from furlong.environments.protocol import ENVIRONMENT
from furlong.errors import ConfigError
from furlong.inference.chat_endpoint import NO_LIMIT, ChatEndpoint, WireTokenizer
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.server import ServerInfo, SglangServer, probe
from furlong.interfaces import DataSource, Engine, Rollout, RolloutPool, SamplingParams
from furlong.models.hf_config import context_length, vocabulary_size
from furlong.models.tokenizer import load_tokenizer
from furlong.rewards.group_reward import GroupReward
from furlong.rollout.agent import policy
from furlong.rollout.agents import AgentHooks
from furlong.rollout.engine_rollout import EngineRollout
from furlong.rollout.episodes import EpisodeLoad
from furlong.rollout.generate import EvalSet, Generation
from furlong.rollout.group_pool import GroupPool
from furlong.rollout.metrics import SampleReport
from furlong.rollout.replay import FunctionRollout, ReplayRollout, SplitRollout
from furlong.rollout.sft import DemonstrationRollout
from furlong.rollout.teachers import Teacher, Teachers
from furlong.rollout.token_alignment import TokenBytes
from furlong.rollout.train_batch import Conversion
from furlong.rollout.user_samples import complete_request
from furlong.sessions.session import SessionSettings
from furlong.tools.template_test import suggested_template
from furlong.tracking.rollout_dump import RolloutDumps
from furlong.wiring.context import RunContext, close_all, start_functions

if TYPE_CHECKING:
    from furlong.sessions.served_model import Gateway
    from furlong.sessions.session_server import SessionServer

EVAL_SEED = 1_000_003  # added to --rollout-seed, so that evaluation and training use different random numbers

logger = logging.getLogger(__name__)


def build_source(context: RunContext, ledger: FileLedger) -> DataSource:
    """Build the data source: the user's own, none, or prompts from a file."""
    data = context.config.data
    if context.hooks.data_source is not None:
        return CustomDataSource(
            context.hooks.data_source(context.args), tokenizer=context.tokenizer, rollout_seed=data.rollout_seed
        )
    replays = context.config.debug.load_debug_rollout_data is not None
    if replays or (data.rollout_global_dataset and data.prompt_data is None):
        return EmptyDataSource()  # dumps, or evaluation only; any other run needs prompts (validated)
    return RolloutDataSource(
        _prompts(context),
        n_samples_per_prompt=data.n_samples_per_prompt,
        shuffle=data.rollout_shuffle,
        rollout_seed=data.rollout_seed,
        num_epoch=data.num_epoch,
        buffer_filter=context.hooks.buffer_filter,
        args=context.args,
        on_drop=ledger.dropped,
    )


def prompt_paths(config: Config) -> list[str]:
    """Return the prompt files of a run: one per environment, which may have its own, or that of --prompt-data."""
    assert config.data.prompt_data is not None
    specs = parse_environments(config.session.environment)
    return [spec.prompt_data or config.data.prompt_data for spec in specs] or [config.data.prompt_data]


def _prompts(context: RunContext) -> Prompts:
    data = context.config.data
    if not data.rollout_global_dataset:
        return EmptyPrompts()
    specs, paths = parse_environments(context.config.session.environment), prompt_paths(context.config)
    if len(paths) == 1:
        return _open_prompts(context, paths[0])
    parts = [
        MixturePart(spec.name, spec.weight, _open_prompts(context, path))
        for spec, path in zip(specs, paths, strict=True)
    ]
    return PromptMixture(parts, key=ENVIRONMENT, seed=data.rollout_seed if data.rollout_shuffle else None)


def _open_prompts(context: RunContext, path: str) -> Prompts:
    config, data = context.config, context.config.data
    return open_prompts(
        path,
        tokenizer=context.tokenizer,
        prompt_format=PromptFormat.of(config),
        streaming=data.streaming_data,
        num_workers=data.num_data_workers,
        skip_bad_rows=config.fault.skip_bad_rows,
    )


def build_rollout(
    context: RunContext, engine: Engine | None, source: DataSource, ledger: FileLedger, specs: list[EvalSpec]
) -> Rollout:
    """Build the rollout: a replay of dumps, the user's function, demonstrations, or generation with the engine."""
    hooks = context.hooks
    rollout = _training_rollout(context, engine, source, ledger, specs)
    if hooks.eval_function in (None, hooks.rollout_function):
        return rollout
    return SplitRollout(rollout, _function_rollout(context, hooks.eval_function, source, ledger))


def pool_of(rollout: Rollout) -> RolloutPool | None:
    """Return the part of a rollout that keeps groups in flight; None if it generates nothing from prompts."""
    trained = rollout.training if isinstance(rollout, SplitRollout) else rollout
    return trained if isinstance(trained, EngineRollout | FunctionRollout) else None


def _training_rollout(
    context: RunContext, engine: Engine | None, source: DataSource, ledger: FileLedger, specs: list[EvalSpec]
) -> Rollout:
    config, hooks = context.config, context.hooks
    if config.debug.load_debug_rollout_data is not None:
        load = partial(RolloutDumps.load, config.debug.load_debug_rollout_data)
        subsample = config.debug.load_debug_rollout_data_subsample
        return ReplayRollout(load, _conversion(context), subsample=subsample, report=_report(context))
    if hooks.rollout_function is not None:
        return _function_rollout(context, hooks.rollout_function, source, ledger)
    eval_sets = [] if engine is None else [build_eval_set(context, engine, spec) for spec in specs]
    if config.algo.loss_type == "sft_loss":
        return DemonstrationRollout(
            tokenizer=context.tokenizer,
            source=source,
            ledger=ledger,
            batch_size=config.data.rollout_batch_size,
            max_len=config.rollout.rollout_max_context_len,
            eval_sets=eval_sets,
            report=_report(context),
            suggest_template=partial(suggested_template, context.tokenizer),
            skip_bad_rows=config.fault.skip_bad_rows,
        )
    assert engine is not None
    return _engine_rollout(context, engine, source, ledger, eval_sets)


def _engine_rollout(
    context: RunContext, engine: Engine, source: DataSource, ledger: FileLedger, eval_sets: list[EvalSet]
) -> EngineRollout:
    config, hooks, flags = context.config, context.hooks, context.config.rollout
    batch_size = config.data.rollout_batch_size
    parts = engine_parts(trained_model(config).groups) if is_started(config) else None  # not running yet
    over_samples = flags.over_sampling_batch_size not in (None, batch_size)
    pool = None  # of the groups that rollouts share
    if shares_groups(config):
        pool = GroupPool(batch_size=batch_size, max_staleness=max_staleness(config), stale=flags.stale_tokens)
    return EngineRollout(
        generation=_generation(context, engine, flags),
        source=source,
        ledger=ledger,
        conversion=_conversion(context),
        flags=flags,
        batch_size=batch_size,
        # Over-sampling without a filter, and partial rollouts, exist to not wait for the slowest group.
        in_order=not flags.partial_rollout and (hooks.dynamic_sampling_filter is not None or not over_samples),
        num_gpus=engine.num_gpus if parts is None else sum(part.num_gpus for part in parts),
        print_every=config.debug.debug_rollout_print_every,
        eval_sets=eval_sets,
        report=_report(context),
        on_groups=context.record_rollout,
        pool=pool,
    )


def _function_rollout(
    context: RunContext, function: Callable[..., Any], source: DataSource, ledger: FileLedger
) -> FunctionRollout:
    return FunctionRollout(
        function,
        source=source,
        ledger=ledger,
        conversion=_conversion(context),
        report=_report(context),
        args=context.args,
        vocab_size=vocabulary_size(context.model_dir),
        on_groups=context.record_rollout,
        on_samples=context.record_evaluation,
    )


def _conversion(context: RunContext) -> Conversion:
    config = context.config
    return Conversion(
        algo=config.algo,
        hooks=context.hooks,
        rollout=config.rollout,
        reward=config.reward,
        moe=config.moe,
        routing=routing_of(config) if returns_routes(config) else None,
        args=context.args,
    )


def _report(context: RunContext) -> SampleReport:
    config = context.config
    return SampleReport(config.track, context.hooks, reward_key=config.reward.reward_key, args=context.args)


def _generation(context: RunContext, engine: Engine, trained: RolloutFlags, *, evaluation: bool = False) -> Generation:
    config, rollout, reward = context.config, context.config.rollout, context.config.reward
    max_new_tokens = rollout.rollout_max_response_len
    if max_new_tokens is None:
        max_new_tokens = trained.rollout_max_context_len or context.context_len  # also where a set has its own context
        logger.info("responses have at most %d tokens, by the context: no --rollout-max-response-len", max_new_tokens)
    scored = GroupReward(  # custom functions run in the sandbox, loaded by path
        rm_type=None if is_unscored(config) else reward.rm_type,
        default=0.0 if is_unscored(config) else None,
        rm_url=reward.rm_url,
        custom_rm=reward.custom_rm_path,
        group_rm=reward.group_rm,
        timeout_s=config.fault.reward_timeout,
        num_workers=reward.num_reward_workers,
        memory_limit_bytes=reward.memory_limit_bytes,
        args=context.args,
        verifier_sandboxes=context.verifier_sandboxes,
    )
    context.rewards.append(scored)
    chat_format = None  # of `policy().chat`, which its conversations share
    if context.tokenizer is not None:
        chat_format = ChatFormat(context.tokenizer, **config.data.apply_chat_template_kwargs)
    return Generation(
        engine=engine,
        tokenizer=context.tokenizer,
        reward=scored,
        params=SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            min_p=rollout.rollout_min_p,
            min_new_tokens=rollout.rollout_min_new_tokens,
            stop=rollout.rollout_stop or (),
            stop_token_ids=rollout.rollout_stop_token_ids or (),
            skip_special_tokens=rollout.rollout_skip_special_tokens,
            return_routed_experts=returns_routes(config) and not evaluation,
        ),
        flags=rollout,
        environments=parse_environments(config.session.environment),
        hooks=context.hooks,
        evaluation=evaluation,
        timeout_s=config.fault.generate_timeout,
        args=context.args,
        vocab_size=context.vocab_size,
        max_tokens=max(trained.rollout_max_context_len or 0, context.context_len),
        chat_format=chat_format,
        load=context.load,
        session_settings=session_settings(config.session, context.hooks),
        session_leaves=context.hooks.session_leaves or cast("Any", config.session.session_leaves),
        session_server=context.session_server,
        teachers=None if evaluation else _teachers(context, engine),
        on_event=context.on_event,
    )


def _teachers(context: RunContext, policy: Engine) -> Teachers | None:
    """Connect to the teachers that are asked during the rollout; None without any. Raises ConfigError."""
    config, opd = context.config, context.config.opd
    if not (specs := teacher_specs(config)):
        return None
    built: dict[str, Teacher] = {}
    own_bytes = TokenBytes(context.tokenizer) if any(spec.tokenizer for spec in specs) else None
    for spec in specs:
        tokenizer: Any = None if spec.tokenizer is None else load_tokenizer(spec.tokenizer)
        if spec.folder is not None:
            folder = Path(spec.folder)
            engine: Engine = EmbeddedEngine(
                folder, dtype=context.dtype, device=context.device, num_slots=1, tokenizer=tokenizer
            )
            length: int | None = context_length(folder)
        else:
            key = context.client_key
            # A model of --sglang-config starts later.
            url = get_model_url(context.args, spec.name, "") if spec.url is None else spec.url
            info = ServerInfo.read({} if spec.url is None else probe(url, api_key=key))
            cluster = config.cluster
            server = SglangServer(
                url,
                info,
                api_key=key,
                concurrency=cluster.sglang_server_concurrency,
                timeout_s=cluster.sglang_router_request_timeout_secs,
                keeps_together=spec.url is not None,
            )
            engine, length = HttpEngine([server], tokenizer=context.tokenizer), info.context_len
        built[spec.name] = Teacher(engine, length, tokenizer, None if tokenizer is None else TokenBytes(tokenizer))
        logger.info("teacher %s: %s", spec.name, redact_credentials(spec.url or spec.folder or "of --sglang-config"))
    teachers = Teachers(
        built,
        policy=policy,
        tokenizer=context.tokenizer,
        key=opd.opd_teacher_key,
        prompt_key=opd.opd_teacher_prompt_key,
        applies_template=config.data.apply_chat_template,
        temperature=config.rollout.rollout_temperature or 1.0,
        num_top=opd.opd_log_prob_top_k if opd.opd_loss == "topk" else 0,
        token_bytes=own_bytes,
    )
    context.rewards.append(teachers)
    return teachers


def build_eval_set(context: RunContext, engine: Engine, spec: EvalSpec) -> EvalSet:
    """Read one evaluation set now, so that a bad file is an error at start-up."""
    trained, config, hooks = context.config.rollout, spec.config, context.hooks
    context = dataclasses.replace(context, config=config)
    prompts = open_prompts(
        spec.path,
        tokenizer=context.tokenizer,
        prompt_format=PromptFormat.of(config, evaluation=True),
        skip_bad_rows=config.fault.skip_bad_rows,
    )
    assert isinstance(prompts, PromptTable)
    environments = parse_environments(config.session.environment)
    for prompt in prompts:
        prompt.metadata.update(spec.metadata_overrides)
        _name_environment(prompt, spec, [each.name for each in environments])

    def groups() -> list[Group]:
        n, seed = config.eval.n_samples_per_eval_prompt, config.data.rollout_seed + EVAL_SEED
        return [
            group_from_prompt(prompt, index=i, first_sample=i * n, n_samples=n, rollout_seed=seed)
            for i, prompt in enumerate(prompts)
        ]

    if (path := config.rollout.custom_generate_function_path) != trained.custom_generate_function_path:
        hooks = dataclasses.replace(hooks, custom_generate_function=load_function(str(path)))
    generation = _generation(context, engine, trained, evaluation=True)
    return EvalSet(
        name=spec.name,
        groups=groups,
        generation=dataclasses.replace(generation, hooks=hooks),
        reward_key=config.reward.reward_key,
        pass_k=config.eval.eval_pass_k or True,
        on_samples=context.record_evaluation,
    )


def _name_environment(prompt: Prompt, spec: EvalSpec, names: Sequence[str]) -> None:
    if len(names) < 2:
        return
    if spec.name in names:
        prompt.metadata[ENVIRONMENT] = spec.name
    elif prompt.metadata.get(ENVIRONMENT) not in names:
        raise ConfigError(
            f"{spec.path}, row {prompt.row}: metadata.environment is {prompt.metadata.get(ENVIRONMENT)!r}, but the "
            f"environments are {', '.join(names)}; name the evaluation set {spec.name} after one of them, or set it "
            "in each row"
        )


def session_settings(flags: SessionFlags, hooks: Hooks) -> SessionSettings:
    """Return the settings of all sessions."""
    key: KeyFunction = partial(key_of, match="strict") if flags.session_match == "strict" else key_of
    parser: ToolParser | None = PARSERS.get(flags.session_tool_parser) or hooks.session_tool_parser
    return SessionSettings(hooks.session_match or key, cast("Any", flags.session_history), parser)


def build_agent_hooks(context: RunContext) -> AgentHooks | None:
    """Return `setup` and `teardown` beside the agent function, and those of the classes of environments.

    None without agents, environments and generate functions.
    """
    flags = context.config.session
    if context.hooks.custom_generate_function is None:
        return None
    owners: dict[str, Any] = {}
    if flags.agent_function_path is not None:
        owners["--agent-function-path"] = import_module_of(flags.agent_function_path)
    for spec in parse_environments(flags.environment):
        owners[f"--environment {spec.path}"] = load_function(spec.path)
    has_processes = bool(owners) and parse_env_workers(flags.env_workers)[0] == "process"
    return AgentHooks(owners, context.args, has_processes=has_processes)


def _has_function(context: RunContext, specs: Sequence[EvalSpec]) -> bool:
    paths = [spec.config.rollout.custom_generate_function_path for spec in specs]
    return context.hooks.custom_generate_function is not None or any(path is not None for path in paths)


def build_session_server(
    context: RunContext, specs: Sequence[EvalSpec], opened: contextlib.ExitStack
) -> SessionServer | None:
    """Open the port of the session server; None if the run has no generate function. `opened` gets its cleanup."""
    if context.tokenizer is None or not _has_function(context, specs):
        return None
    from furlong.sessions.session_offers import SessionOffers  # import a web server, which most runs do not need
    from furlong.sessions.session_server import SessionServer

    flags = context.config.session
    server = SessionServer(
        host=flags.session_server_host,
        port=flags.session_server_port,
        model_name=str(context.model_dir),
        client_sampling=flags.session_client_sampling,
        offers=SessionOffers(os.environ.get(SESSIONS_KEY_VARIABLE)) if flags.online_sessions else None,
    )
    opened.callback(lambda: asyncio.run(server.close()))
    if flags.online_sessions:
        logger.info("applications take sessions with POST http://%s/sessions", host_and_port(*server.address))
    logger.info("sessions of agents: http://%s:%d", *server.address)
    return server


MODEL = "actor"  # name of the trained model for `get_model_url`, as in slime


def build_gateway(
    context: RunContext, engine: Engine, specs: Sequence[EvalSpec], opened: contextlib.ExitStack
) -> Gateway | None:
    """Open the port of the endpoint; None if no function of the run could post to it. `opened` gets its cleanup."""
    if context.config.cluster.sglang_router_ip is not None:  # of engines that the run did not start
        return None
    hooks = context.hooks
    may_post = any((hooks.rollout_function, hooks.eval_function, hooks.custom_rm, hooks.data_source))
    if not may_post and not _has_function(context, specs):
        return None
    from furlong.sessions.served_model import Gateway  # imports a web server, which most runs do not need

    gateway = Gateway(
        partial(complete_request, engine),
        encode=lambda text: list(context.tokenizer.encode(text)),
        facts={"model_path": str(context.model_dir), "tokenizer_path": str(context.model_dir), "is_generation": True},
        api_key=context.client_key,
        tokenizer=context.tokenizer,
        port=context.config.cluster.sglang_router_port or 0,
    )
    opened.callback(lambda: asyncio.run(gateway.close()))
    logger.info("args.sglang_router_ip and args.sglang_router_port: %s:%d answers /generate", *gateway.address)
    return gateway


SINGLE_TURN = "furlong.wiring.rollout:single_turn"


@dataclass(frozen=True)
class EndpointOptions:
    """A chat endpoint. extra: fields added to each request."""

    base_url: str
    model: str
    key: str | None
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Evaluation sets, and what answers their requests."""

    sets: Sequence[EvalSet]
    engine: Engine
    context: RunContext
    server: SessionServer | None
    hooks: AgentHooks | None

    async def start(self) -> None:
        """Load reward functions and answer requests of agents."""
        listeners = [] if self.server is None else [self.server]
        await start_functions(self.context.rewards, self.hooks, listeners)

    async def close(self) -> None:
        """Stop processes and connections."""
        await close_all(
            None if self.server is None else self.server.close,
            self.engine.close,
            *(reward.close for reward in self.context.rewards),
            None if self.hooks is None else self.hooks.tear_down,
        )


def build_evaluation(config: Config, specs: Sequence[EvalSpec], endpoint: EndpointOptions | None) -> Evaluation:
    """Read the sets, and load the model or open the endpoint. Raises ConfigError and DataError."""
    context = _context(config, endpoint)
    with contextlib.ExitStack() as opened:
        server = build_session_server(context, specs, opened)
        context = dataclasses.replace(context, session_server=server)
        if endpoint is not None:
            concurrency = config.rollout.max_concurrent_episodes or 32
            engine: Engine = ChatEndpoint(
                endpoint.base_url, endpoint.model, key=endpoint.key, extra=endpoint.extra, concurrency=concurrency
            )
            chat = {"rollout_max_prompt_len": None}  # single turns are chats, too, where ids are unknown
            for i, spec in enumerate(specs := list(specs)):
                path = spec.config.rollout.custom_generate_function_path or SINGLE_TURN
                values = {**chat, "custom_generate_function_path": path}
                specs[i] = dataclasses.replace(spec, config=config_from_values(values, spec.config))
        else:
            engine = EmbeddedEngine(
                context.model_dir,
                dtype=context.dtype,
                device=context.device,
                num_slots=config.cluster.embedded_num_slots,
                context_len=config.rollout.rollout_max_context_len,
                tokenizer=context.tokenizer,
            )
        opened.callback(lambda: asyncio.run(engine.close()))
        sets = [build_eval_set(context, engine, spec) for spec in specs]
        hooks = build_agent_hooks(context)
        opened.pop_all()
    return Evaluation(sets, engine, context, server, hooks)


def _context(config: Config, endpoint: EndpointOptions | None) -> RunContext:
    if endpoint is None:
        context = RunContext.read(config, usable_hooks(config), Path())
        return dataclasses.replace(context, dumps=RolloutDumps(config.debug.save_debug_rollout_data))
    tokenizer = WireTokenizer()
    return RunContext(
        config=config,
        hooks=usable_hooks(config),
        args=Args(config),
        folder=Path(),
        model_dir=Path(endpoint.model),
        tokenizer=tokenizer,
        context_len=NO_LIMIT,
        vocab_size=len(tokenizer),
        device="cpu",
        dtype=torch.float32,
        dumps=RolloutDumps(None),
        load=EpisodeLoad(config.rollout.max_concurrent_episodes),
    )


async def single_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:  # noqa: ARG001  slime's signature
    """Answer the sample's prompt once."""
    prompt: Any = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    await policy().chat(messages, tools=sample.tools)
    return sample
