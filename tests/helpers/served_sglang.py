"""SGLang servers for GPU tests, and a comparison of their log-probs with a model's."""

from __future__ import annotations

import asyncio
import contextlib
import os

import torch

from furlong.config.sections import Config, EnginesFlags
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.supervisor.launch import SglangLaunch
from furlong.inference.supervisor.process import HostGpus, LocalHost
from furlong.inference.supervisor.supervisor import ReplicaSet
from furlong.interfaces import SamplingParams

BACKEND = os.environ.get("FURLONG_TEST_ATTENTION", "fa3")
PROMPTS = [[(37 * i + 11 * j + 5) % 1000 for j in range(12 + 7 * i)] for i in range(6)]


@contextlib.contextmanager
def served(folder, runner, routing=None, *, num_gpus=1, **options):
    """Run one SGLang server on the last GPUs, so that NCCL can connect it to this process on another GPU."""
    engine = HttpEngine([], is_supervised=True, routing=routing)
    launch = SglangLaunch(
        folder / "model", num_gpus=num_gpus, has_text=False, context_len=1024,
        return_routed_experts=routing is not None,
        options={
            "attention_backend": BACKEND, "disable_cuda_graph": True, "max_total_tokens": 1 << 16, "dtype": "bfloat16",
            **options,
        },
    )  # fmt: skip
    replicas = ReplicaSet(
        [launch],
        [[HostGpus(LocalHost(), torch.cuda.device_count() - num_gpus, num_gpus)]],
        engine,
        log_dir=folder / "logs",
        config=Config(engines=EnginesFlags(sglang_server_start_timeout=400)),
        probe_s=30,
    )
    runner.run(replicas.start())
    yield engine
    runner.run(engine.close())
    runner.run(replicas.close())


def log_probs_of(model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + tokens], device="cuda")
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1).cpu()


def mean_difference(model, runner, engine) -> float:
    """Return the mean difference between the log-probs of an engine and those of this model."""
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)

    async def body():
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))

    gaps = []
    for prompt, done in zip(PROMPTS, runner.run(body()), strict=True):
        assert len(done.tokens) == 64
        assert done.finish_reason == "length"
        gaps.append((torch.tensor(done.log_probs) - log_probs_of(model, prompt, done.tokens)).abs())
    return float(torch.cat(gaps).mean())
