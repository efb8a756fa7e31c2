"""Experts that the embedded engine records on a CUDA device are those of the trainer there, and can be replayed."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from backends import fsdp_backend
from furlong.config.sections import MoeFlags, OptimFlags
from furlong.core.batch import RolloutBatch, pack_micro_batch
from furlong.core.routing import RoutingShape
from furlong.core.sample import Group, Sample
from furlong.inference.embedded import EmbeddedEngine
from furlong.interfaces import Completion, SamplingParams
from furlong.models import hf_model as hf
from furlong.models.hf_config import load_config
from furlong.rollout.generate import append_completion
from furlong.rollout.train_batch import Conversion, batch_from_groups
from models_zoo import family_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3", "glm4_moe_lite", "qwen3_next")
PROMPTS = [[5, 9, 11, 3], [5, 9, 11, 3], [7, 2], [30, 31, 8, 4, 6, 21], [30, 31, 8, 4, 6, 21]]
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True, return_routed_experts=True)


def generate(folder) -> list[Completion]:
    engine = EmbeddedEngine(folder, dtype=torch.float32, num_slots=3, return_routed_experts=True, device="cuda")

    async def run() -> list[Completion]:
        try:
            params = [dataclasses.replace(PARAMS, sampling_seed=i) for i in range(len(PROMPTS))]
            return list(await asyncio.gather(*(engine.generate(p, s) for p, s in zip(PROMPTS, params, strict=True))))
        finally:
            await engine.close()

    return asyncio.run(run())


def batch_of(folder, completions: list[Completion]) -> RolloutBatch:
    groups = []
    for number, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True)):
        sample = Sample(tokens=list(prompt), index=number, group_index=number, reward=float(number % 2))
        append_completion(sample, completion)
        groups.append(Group(number, [sample]))
    shape = RoutingShape.of(load_config(folder).to_dict())
    return batch_from_groups(0, groups, Conversion(routing=shape, moe=MoeFlags(use_rollout_routing_replay=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_engine_choose_the_same_experts_on_cuda(family, tmp_path):
    model = hf.build_model(family_config(family), seed=3)
    with torch.no_grad():  # routers that prefer some experts, as trained ones do
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.mul_(20)
    hf.save_model(model, tmp_path)
    batch = batch_of(tmp_path, generate(tmp_path))
    where = {"device": "cuda", "dtype": torch.float32}
    for replay in ("none", "rollout"):
        trained = fsdp_backend(tmp_path, optim=OptimFlags(lr=1e-3), routing_replay=replay, **where)
        stats = trained.log_probs(pack_micro_batch(batch, np.arange(len(batch)), device=trained.device))
        got = stats.log_probs_R.float().cpu().numpy()
        np.testing.assert_allclose(got, batch.columns["rollout_log_probs"], atol=1e-4, err_msg=replay)
        if replay == "none":
            assert float(stats.rerouted_R.max()) == 0.0
