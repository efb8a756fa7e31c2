"""Routing replay: the trainer uses the experts chosen by the engine or by its own log-prob pass."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from backends import fsdp_backend
from fakes_engine import Halt
from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags, MoeFlags, OptimFlags
from furlong.core.batch import RolloutBatch, pack_micro_batch
from furlong.core.routing import RoutingShape, routes_from_text
from furlong.core.sample import Group, Sample
from furlong.core.weights import WeightSource, checksum
from furlong.errors import EngineError, RolloutError, TrainerError
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.request_error import RequestError
from furlong.inference.server.http_server import running_server
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.interfaces import Completion, SamplingParams
from furlong.models import hf_model as hf
from furlong.models.hf_config import load_config
from furlong.models.quantized_folder import folder_scheme
from furlong.models.stored_tensors import open_tensors
from furlong.quantization.int4 import Int4Groups
from furlong.rollout.generate import append_completion
from furlong.rollout.train_batch import Conversion, batch_from_groups
from furlong.tools.quantize_folder import quantize_folder
from furlong.training.fsdp.backend import FsdpBackend
from furlong.training.packing import Packing
from furlong.training.worker import RoleLoss, RoundWorker
from models_zoo import family_config

FAMILIES = ("qwen3_moe", "glm4_moe", "gpt_oss")
PARAMS = SamplingParams(max_new_tokens=9, ignore_eos=True, return_routed_experts=True)
FLAGS = AlgoFlags(advantage_estimator="grpo")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for name in FAMILIES:
        model = hf.build_model(family_config(name), seed=3)
        with torch.no_grad():  # routers that prefer some experts, as trained ones do
            for key, parameter in model.named_parameters():
                if "gate.weight" in key or "router.weight" in key:
                    parameter.mul_(20)
        made[name] = tmp_path_factory.mktemp(name)
        hf.save_model(model, made[name])
    return made


def generate(folder: Path, prompts: list[list[int]], **options) -> list[Completion]:
    engine = EmbeddedEngine(folder, dtype=torch.float32, num_slots=3, return_routed_experts=True, **options)

    async def run() -> list[Completion]:
        try:
            params = [dataclasses.replace(PARAMS, sampling_seed=i) for i in range(len(prompts))]
            return list(await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, params, strict=True))))
        finally:
            await engine.close()

    return asyncio.run(run())


PROMPTS = [[5, 9, 11, 3], [5, 9, 11, 3], [7, 2], [30, 31, 8, 4, 6, 21], [30, 31, 8, 4, 6, 21]]


@pytest.fixture(scope="module")
def rollouts(folders) -> dict[str, RolloutBatch]:
    return {name: batch_of(folders[name], generate(folders[name], PROMPTS)) for name in FAMILIES}


def batch_of(folder: Path, completions: list[Completion]) -> RolloutBatch:
    groups = []
    for i, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True)):
        sample = Sample(tokens=list(prompt), index=i, group_index=i, reward=float(i % 2))
        append_completion(sample, completion)
        groups.append(Group(i, [sample]))
    shape = RoutingShape.of(load_config(folder).to_dict())
    return batch_from_groups(0, groups, Conversion(routing=shape, moe=REPLAYS))


def backend(folder: Path, replay: str, **options) -> FsdpBackend:
    return fsdp_backend(folder, optim=OptimFlags(lr=1e-3), routing_replay=replay, **options)


def disturb(trained: FsdpBackend, *, by: float) -> None:
    """Change what the routers choose, as a rounding error would, and much else if `by` is large."""
    with torch.no_grad():
        for key, parameter in trained.actor.model.named_parameters():
            if "gate.weight" in key or "router.weight" in key:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                parameter.add_(noise * by)


def all_rows(batch: RolloutBatch) -> np.ndarray:
    return np.arange(len(batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_records_every_token_but_the_last(family, rollouts):
    batch = rollouts[family]
    last = batch.starts[1:] - 1
    is_known = (batch.routed_experts >= 0).all((1, 2))
    assert np.flatnonzero(~is_known).tolist() == last.tolist()
    assert len(np.unique(batch.routed_experts)) > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_engine_agree_on_an_identical_model(family, folders, rollouts):
    batch = rollouts[family]
    stats = backend(folders[family], "none").log_probs(pack_micro_batch(batch, all_rows(batch)))
    assert float(stats.rerouted_R.max()) == 0.0
    np.testing.assert_allclose(stats.log_probs_R, batch.columns["rollout_log_probs"], atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_restores_the_choices_of_a_perturbed_router(family, folders, rollouts):
    """Biased choices, the same gating weights: what a rounding error in the engine's router does."""
    batch = rollouts[family]
    micro = pack_micro_batch(batch, all_rows(batch))
    shuffled = batch.routed_experts.copy()
    rng = np.random.default_rng(0)
    known = shuffled[..., 0] >= 0
    shuffled[known] = rng.permuted(np.tile(np.arange(4), (int(known.sum()), 1)), axis=1)[:, :2]
    other = dataclasses.replace(micro, routed_experts_TLK=torch.from_numpy(shuffled))
    engine = backend(folders[family], "rollout", role_folders={"teacher": folders[family]})
    trained = backend(folders[family], "rollout")
    wanted = engine.log_probs(other).log_probs_R
    plain = engine.log_probs(micro).log_probs_R
    assert float((wanted - plain).abs().max()) > 1e-3, "the choice of experts has to matter"
    by_itself = engine.log_probs(other, model="teacher").log_probs_R  # a teacher has not sampled
    np.testing.assert_allclose(by_itself, plain, atol=1e-6)
    disturb(trained, by=1e-6)
    np.testing.assert_allclose(trained.log_probs(other).log_probs_R, wanted, atol=1e-4)


def gradients(trained: FsdpBackend) -> dict[str, torch.Tensor]:
    return {name: gradient.clone() for name, gradient in trained.named_gradients()}


def trained_on(folder: Path, batch: RolloutBatch, parts: list[list[int]], replay="rollout", **options) -> FsdpBackend:
    """Accumulate the loss of the whole batch, cut into micro-batches like this."""
    trained = backend(folder, replay, **options)
    count = len(batch.loss_masks)
    values = torch.linspace(-1, 1, count).numpy()
    batch = batch.with_columns(advantages=values, old_log_probs=batch.columns["rollout_log_probs"])
    weights = np.full(count, 1 / count, np.float32)
    trained.metrics = [
        trained.forward_backward(pack_micro_batch(batch, rows, weights), PolicyLoss(FLAGS)) for rows in parts
    ]
    return trained


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_replay_do_not_depend_on_packing_order_and_recomputation(family, folders, rollouts):
    batch = rollouts[family]
    shuffled = batch.routed_experts.copy()  # choices that no router here would make
    known = shuffled[..., 0] >= 0
    shuffled[known] = (shuffled[known] + 1) % 4
    batch = dataclasses.replace(batch, routed_experts=shuffled)
    wanted = gradients(trained_on(folders[family], batch, [[0], [1], [2], [3], [4]], share_prompts=False))
    routers = [name for name in wanted if "gate.weight" in name or "router.weight" in name]
    assert routers
    assert all(float(wanted[name].abs().max()) > 1e-6 for name in routers), "gating weights are trained"
    for parts, options in (([[4, 0, 3, 1, 2]], {}), ([[2, 3], [1, 0, 4]], {"recompute_activations": True})):
        found = gradients(trained_on(folders[family], batch, parts, **options))
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=2e-6, msg=name)


def test_a_shared_prompt_is_run_once_only_where_it_went_to_the_same_experts(folders, rollouts):
    batch = rollouts["qwen3_moe"]
    other = batch.routed_experts.copy()
    other[batch.starts[1]] = (other[batch.starts[1]] + 1) % 4  # the second sample's first prompt token
    batch = dataclasses.replace(batch, routed_experts=other)
    trained = backend(folders["qwen3_moe"], "rollout")
    together = trained.log_probs(pack_micro_batch(batch, [0, 1])).log_probs_R
    alone = [trained.log_probs(pack_micro_batch(batch, [i])).log_probs_R for i in (0, 1)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def worker(folder: Path, replay: str, **options) -> RoundWorker:
    return RoundWorker(
        backend(folder, replay),
        algo=FLAGS,
        losses=[RoleLoss("actor", PolicyLoss(FLAGS))],
        packing=Packing(micro_batch_size=2, global_batch_size=2),
        records_routes=replay == "policy",
        **options,
    )


def test_the_policys_own_choice_is_replayed_in_every_step(folders, rollouts):
    batch = rollouts["qwen3_moe"].select([0, 1, 2, 3])
    batch = dataclasses.replace(batch, routed_experts=None)
    found = {}
    for replay in ("none", "policy"):
        trained = worker(folders["qwen3_moe"], replay)
        used: list[torch.Tensor] = []
        plain, step = trained.backend.forward_backward, trained.backend.optim_step

        def spied(micro, loss, plain=plain, used=used, **role):
            used.append(micro.policy_routes)
            return plain(micro, loss, **role)

        def disturbed(backend=trained.backend, step=step, **role):
            report = step(**role)
            disturb(backend, by=0.5)
            return report

        trained.backend.forward_backward, trained.backend.optim_step = spied, disturbed
        metrics = trained.train(batch)
        found[replay] = (used, metrics)
    assert found["none"][0] == [None, None]
    for recorded in found["policy"][0]:
        assert recorded.dtype == torch.int16
        assert recorded.shape[::2] == (2, 2)  # layers, experts a token
    assert found["none"][1]["train/loss"].value != found["policy"][1]["train/loss"].value
    assert "train/routing_agreement" not in found["policy"][1]


def test_replay_without_a_record_is_an_error(folders, rollouts):
    batch = dataclasses.replace(rollouts["qwen3_moe"], routed_experts=None)
    with pytest.raises(TrainerError, match="no routed experts"):
        backend(folders["qwen3_moe"], "rollout").log_probs(pack_micro_batch(batch, [0]))


def test_agreement_is_the_share_of_choices_in_common(folders, rollouts):
    batch = rollouts["qwen3_moe"]
    routes = batch.routed_experts.copy()
    changed = batch.starts[:-1] + batch.lengths - batch.response_lengths  # the first response token of each sample
    for position in changed:  # in one of two layers the two experts that were not chosen
        routes[position, 0] = [e for e in range(4) if e not in batch.routed_experts[position, 0]]
    batch = dataclasses.replace(batch, routed_experts=routes)
    trained = trained_on(folders["qwen3_moe"], batch, [[0, 1], [2, 3, 4]], replay="none")
    first, second = (metrics["routing_agreement"] for metrics in trained.metrics)
    assert (first + second).value == pytest.approx(1 - len(changed) * 0.5 / len(batch.loss_masks))


# -- the engine


def test_a_request_keeps_the_routes_its_tokens_were_sampled_with(folders, monkeypatch):
    """Three slots for five requests of two prompts, and new weights half way: prompts are run again."""
    shape = RoutingShape.of(load_config(folders["qwen3_moe"]).to_dict())
    params = dataclasses.replace(PARAMS, max_new_tokens=40, sampling_seed=1)
    engine = EmbeddedEngine(folders["qwen3_moe"], dtype=torch.float32, num_slots=3, return_routed_experts=True)
    other = hf.build_model(family_config("qwen3_moe"), seed=8)
    weights = [(n, t) for name, tensor in hf.named_tensors(other) for n, t in hf.on_disk(other, name, tensor)]

    async def run() -> tuple[Completion, Completion]:
        try:
            before = await engine.generate(PROMPTS[0], params)
            halt = Halt(monkeypatch, after_steps=20)
            running = [asyncio.create_task(engine.generate(p, params)) for p in (PROMPTS[0], *PROMPTS)]
            await halt.reached()
            await engine.pause("hold")
            halt.release()
            await engine.load_weights(WeightSource(lambda: weights), version=1)
            await engine.resume()
            return before, (await asyncio.gather(*running))[0]
        finally:
            await engine.close()

    before, after = asyncio.run(run())
    num_old = after.versions.index(1)
    assert 0 < num_old < 40
    assert after.tokens[:num_old] == before.tokens[:num_old]
    known = len(PROMPTS[0]) + num_old - 1  # rows that tokens of the old weights rest on
    assert after.routed_experts.shape == (len(PROMPTS[0]) + 39, shape.num_layers, shape.top_k)
    np.testing.assert_array_equal(after.routed_experts[:known], before.routed_experts[:known])
    assert (after.routed_experts[known:] != before.routed_experts[known:]).any()


def test_servers_return_requested_routes(folders):
    engine = EmbeddedEngine(folders["glm4_moe"], dtype=torch.float32, return_routed_experts=True)
    shape = RoutingShape.of(load_config(folders["glm4_moe"]).to_dict())

    async def run() -> None:
        try:
            async with running_server(engine) as url:
                server = SglangServer(url, ServerInfo.read({}))
                client = HttpEngine([server], routing=shape)
                own = await engine.generate(PROMPTS[3], dataclasses.replace(PARAMS, sampling_seed=5))
                served = await client.generate(PROMPTS[3], dataclasses.replace(PARAMS, sampling_seed=5))
                np.testing.assert_array_equal(served.routed_experts, own.routed_experts)
                assert (served.routed_experts[:, 0] == 0).all(), "the first layer has no experts"
                plain = dataclasses.replace(PARAMS, sampling_seed=5, return_routed_experts=False)
                assert (await client.generate(PROMPTS[3], plain)).routed_experts is None
                body = {"input_ids": PROMPTS[3], "sampling_params": {"max_new_tokens": 3}}
                body |= {"return_routed_experts": True, "routed_experts_start_len": 4}
                reply = await server.ask("/generate", body, timeout_s=30)
                assert len(routes_from_text(reply["meta_info"]["routed_experts"], shape, "it")) == 6 + 3 - 1 - 4
                wrong = HttpEngine([server], routing=dataclasses.replace(shape, num_experts=2))
                with pytest.raises(EngineError, match="the engine serves another model"):
                    await wrong.generate(PROMPTS[3], PARAMS)
                await client.close()
                await wrong.close()
        finally:
            await engine.close()

    asyncio.run(run())


def test_an_engine_without_recorded_routes_is_an_error(folders, tmp_path):
    engine = EmbeddedEngine(folders["qwen3_moe"], dtype=torch.float32)
    with pytest.raises(RequestError, match="--enable-return-routed-experts"):
        engine.check([1], PARAMS)
    asyncio.run(engine.close())
    hf.save_model(hf.build_model(family_config("qwen3"), seed=0), tmp_path)
    with pytest.raises(EngineError, match="has no experts"):
        EmbeddedEngine(tmp_path, dtype=torch.float32, return_routed_experts=True)


# -- quantized folders


def test_an_int4_engine_records_routes_of_its_unquantized_router_and_they_are_replayed(folders, tmp_path):
    """The trainer has the weights before quantization, as with --ref-load: its own choices are others."""
    whole, quantized = folders["qwen3_moe"], tmp_path
    quantize_folder(whole, quantized, Int4Groups(8))
    scheme = folder_scheme(quantized)
    assert scheme is not None
    assert any(".experts." in name for name in scheme.names)
    with open_tensors(quantized) as stored, open_tensors(whole) as original:
        routers = [name for name in original.names if name.endswith("mlp.gate.weight")]
        assert len(routers) == 2
        assert all(torch.equal(stored.read(name), original.read(name)) for name in routers)
        assert not scheme.names.intersection(routers)
    batch = batch_of(quantized, generate(quantized, PROMPTS))
    known = (batch.routed_experts >= 0).all((1, 2))
    assert np.flatnonzero(~known).tolist() == (batch.starts[1:] - 1).tolist()
    micro = pack_micro_batch(batch, all_rows(batch))
    engine_R = batch.columns["rollout_log_probs"]
    rounded = backend(quantized, "rollout").log_probs(micro)
    assert float(rounded.rerouted_R.max()) == 0.0
    np.testing.assert_allclose(rounded.log_probs_R, engine_R, atol=2e-6)
    replayed, chosen = (backend(whole, replay).log_probs(micro) for replay in ("rollout", "none"))
    rerouted = replayed.rerouted_R.numpy() > 0
    assert rerouted.any(), "rounded experts change what the next router chooses"
    gaps = [np.abs(stats.log_probs_R.numpy() - engine_R)[rerouted].mean() for stats in (replayed, chosen)]
    assert gaps[0] < 0.95 * gaps[1]


# -- samples


def test_a_later_completion_adds_rows_and_keeps_known_ones():
    sample = Sample(tokens=[1, 2])
    first = np.zeros((3, 2, 2), np.int16)
    append_completion(sample, Completion([3, 4], [0.0, 0.0], [0, 0], "abort", routed_experts=first))
    longer = np.ones((6, 2, 2), np.int16)
    sample.append_response_tokens(tokens=[9], trainable=False)
    append_completion(sample, Completion([5, 6], [0.0, 0.0], [1, 1], "stop", routed_experts=longer))
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    again = Sample.from_dict(sample.to_dict())
    np.testing.assert_array_equal(again.rollout_routed_experts, sample.rollout_routed_experts)


REPLAYS = MoeFlags(use_rollout_routing_replay=True)
SHAPE = RoutingShape(2, 2, 4)


def sample_with(rows: int | None, *, mask: list[int]) -> Sample:
    routes = None if rows is None else np.tile(np.array([0, 1], np.int16), (rows, 2, 1))
    return Sample(
        tokens=[1, 2, 3, 4, 5], response_length=3, loss_mask=mask, index=7, group_index=0, reward=1.0,
        rollout_routed_experts=routes,
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "mask"), [(None, [1, 0, 0]), (3, [1, 1, 1]), (1, [1, 0, 0])])
def test_a_trained_token_without_a_record_is_an_error(rows, mask):
    with pytest.raises(RolloutError, match="sample 7 has routed experts"):
        batch_from_groups(
            0,
            [Group(0, [sample_with(rows, mask=mask)])],
            Conversion(routing=SHAPE, moe=REPLAYS),
        )


@pytest.mark.parametrize(("rows", "mask"), [(4, [1, 1, 1]), (3, [1, 1, 0]), (2, [1, 0, 0]), (None, [0, 0, 0])])
def test_tokens_after_the_last_trained_one_need_no_routes(rows, mask):
    groups = [Group(0, [sample_with(rows, mask=mask)])]
    batch = batch_from_groups(0, groups, Conversion(routing=SHAPE, moe=REPLAYS))
    assert (batch.routed_experts[:, 0, 0] >= 0).tolist() == [i < (rows or 0) for i in range(5)]


def test_the_record_of_another_model_is_an_error():
    group = Group(0, [sample_with(4, mask=[1, 1, 1])])
    with pytest.raises(ValueError, match="this model has"):
        batch_from_groups(0, [group], Conversion(routing=RoutingShape(3, 2, 4), moe=REPLAYS))
    with pytest.raises(ValueError, match="the engine serves another model"):
        batch_from_groups(0, [group], Conversion(routing=RoutingShape(2, 2, 1), moe=REPLAYS))


# -- weights


def test_the_bias_of_a_choice_reaches_the_engine_and_is_verified(folders):
    """It is a buffer, and no parameter."""
    trained = backend(folders["glm4_moe"], "none")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.tensor([0.5, -0.25, 0.0, 2.0])
    trained.actor.model.get_buffer(name).copy_(bias)
    engine = EmbeddedEngine(folders["glm4_moe"], dtype=torch.float32)

    async def run() -> tuple[dict[str, str], torch.Tensor]:
        try:
            loaded = await engine.load_weights(WeightSource(trained.named_weights), 1)
            return loaded, await engine.execute(engine.model.table.view(name).clone)
        finally:
            await engine.close()

    checksums, held = asyncio.run(run())
    torch.testing.assert_close(held, bias, rtol=0, atol=0)
    assert checksums[name] == checksum(bias)
