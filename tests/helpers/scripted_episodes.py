"""Episodes of generate functions and environments with a policy that answers from a function of the conversation."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from chat_zoo import bpe_tokenizer
from fakes_rollout import LabelReward, ScriptedEngine
from furlong.chat.template_boundary import ChatFormat
from furlong.config.hooks import Hooks
from furlong.core.event_loop import gather_or_cancel
from furlong.core.sample import Group, Sample
from furlong.interfaces import Reward, SamplingParams
from furlong.rollout.episodes import RewardWait
from furlong.rollout.generate import Generation, run_group


@functools.cache
def chat_format() -> ChatFormat:
    """The chat format of all episodes, whose template is proven once."""
    return ChatFormat(bpe_tokenizer("qwen"))


def play(
    function: Callable[..., Any],
    answer: Callable[[str], str],
    *,
    num_samples: int = 1,
    reward: Reward | None = None,
    prompt: Any = "1+2=",
    label: Any = 0.0,
    metadata: dict[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    client: Callable[[], Coroutine[Any, Any, None]] | None = None,
    **settings: Any,
) -> list[Sample]:
    """Play one group; `answer` gets the rendered conversation and returns the text of the reply.

    The server `session_server` answers meanwhile, and `client` runs, whose errors are raised.
    """
    tokenizer = chat_format().tokenizer

    def script(ids: list[int], params: SamplingParams) -> list[int]:
        reply = tokenizer.encode(answer(tokenizer.decode(ids)), add_special_tokens=False)
        return [*reply, tokenizer.eos_token_id]

    async def main() -> list[Sample]:
        generation = Generation(
            engine=ScriptedEngine(script),
            tokenizer=tokenizer,
            reward=reward or LabelReward(),
            params=SamplingParams(max_new_tokens=64, skip_special_tokens=False),
            hooks=Hooks(custom_generate_function=function),
            vocab_size=len(tokenizer),
            max_tokens=2048,
            args=SimpleNamespace(**(args or {})),
            chat_format=chat_format(),
            **settings,
        )
        samples = [
            Sample(0, i, i, prompt=prompt, tokens=[2], seed=i, label=label, metadata=dict(metadata or {}))
            for i in range(num_samples)
        ]
        group = Group(0, samples)
        if generation.session_server is not None:
            await generation.session_server.start()
        run = run_group(group, generation, rollout_id=0, continues=lambda: True, wait=RewardWait())
        try:
            await gather_or_cancel([run, *([client()] if client is not None else [])])
        finally:
            if generation.session_server is not None:
                await generation.session_server.close()
        return group.samples

    return asyncio.run(main())
