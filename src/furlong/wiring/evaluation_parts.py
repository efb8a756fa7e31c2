"""Builds what `furlong eval` drives: evaluation sets with a model in this process, or with a chat endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from furlong.config.args_view import Args
from furlong.config.evaluation import EvalSpec
from furlong.config.hooks import usable_hooks
from furlong.config.sections import Config
from furlong.core.sample import Sample
from furlong.inference.chat_endpoint import NO_LIMIT, ChatEndpoint
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.wire_chat import WireTokenizer
from furlong.interfaces import Engine
from furlong.rollout.agent import policy
from furlong.rollout.agent_hooks import AgentHooks
from furlong.rollout.episode_load import EpisodeLoad
from furlong.rollout.eval_rollout import EvalSet
from furlong.tracking.rollout_dump import RolloutDumps
from furlong.wiring.rollout_parts import build_eval_set
from furlong.wiring.run_context import RunContext
from furlong.wiring.session_parts import build_agent_hooks, build_session_server

if TYPE_CHECKING:
    from furlong.sessions.session_server import SessionServer

SINGLE_TURN = "furlong.wiring.evaluation_parts:single_turn"


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
        for reward in self.context.rewards:
            await reward.start()
        if self.hooks is not None:
            await self.hooks.set_up()
        if self.server is not None:
            await self.server.start()

    async def close(self) -> None:
        """Stop processes and connections."""
        async with contextlib.AsyncExitStack() as stack:
            if self.hooks is not None:
                stack.push_async_callback(self.hooks.tear_down)
            for reward in self.context.rewards:
                stack.push_async_callback(reward.close)
            stack.push_async_callback(self.engine.close)
            if self.server is not None:
                stack.push_async_callback(self.server.close)


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
            specs = [_over_chat(spec) for spec in specs]
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
        return RunContext.read(config, usable_hooks(config), Path())
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


def _over_chat(spec: EvalSpec) -> EvalSpec:
    """Return the set with a generate function: single turns are chats, too, where ids are unknown."""
    return dataclasses.replace(
        spec, custom_generate_function_path=spec.custom_generate_function_path or SINGLE_TURN, max_prompt_len=None
    )


async def single_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:  # noqa: ARG001  slime's signature
    """Answer the sample's prompt once."""
    prompt: Any = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    await policy().chat(messages, tools=sample.tools)
    return sample
