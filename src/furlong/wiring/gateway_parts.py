"""Builds the endpoint that user functions post to in a run without a router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from furlong.config.evaluation import EvalSpec
from furlong.config.hooks import Hooks
from furlong.interfaces import Engine
from furlong.rollout.agent import complete_request
from furlong.wiring.run_context import RunContext

if TYPE_CHECKING:
    from furlong.inference.server.gateway import Gateway

MODEL = "actor"  # name of the trained model for `get_model_url`, as in slime

logger = logging.getLogger(__name__)


def build_gateway(
    context: RunContext, engine: Engine, specs: Sequence[EvalSpec], opened: contextlib.ExitStack
) -> Gateway | None:
    """Open the port of the endpoint; None if no function of the run could post to it. `opened` gets its cleanup."""
    if context.config.cluster.sglang_router_ip is not None:  # of engines that the run did not start
        return None
    if not _may_post(context.hooks) and all(spec.custom_generate_function_path is None for spec in specs):
        return None
    from furlong.inference.server.gateway import Gateway  # imports a web server, which most runs do not need

    gateway = Gateway(
        partial(complete_request, engine),
        encode=lambda text: list(context.tokenizer.encode(text)),
        facts={"model_path": str(context.model_dir), "tokenizer_path": str(context.model_dir), "is_generation": True},
        api_key=context.config.cluster.sglang_api_key,
    )
    opened.callback(lambda: asyncio.run(gateway.close()))
    logger.info("args.sglang_router_ip and args.sglang_router_port: %s:%d answers /generate", *gateway.address)
    return gateway


def _may_post(hooks: Hooks) -> bool:
    functions = (hooks.custom_generate_function, hooks.rollout_function, hooks.eval_function, hooks.custom_rm)
    return any(function is not None for function in (*functions, hooks.data_source))
