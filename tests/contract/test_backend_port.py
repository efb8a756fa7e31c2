"""The contract of training backends, run over all implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends import fsdp_backend
from fakes_trainer import FakeBackend
from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.core.batch import pack_micro_batch
from furlong.core.metric import merge
from furlong.core.weights import checksum
from furlong.errors import CheckpointError, TrainerError
from furlong.files.atomic import PendingFiles
from furlong.models.hf_model import build_model, save_model
from models_zoo import family_config, random_batch

BATCH = random_batch(prompts=[5, 3], responses=[[6, 2, 9], [4, 7]])
ROWS = np.arange(len(BATCH))


def fsdp(folder, *, dtype, **optim):
    if not folder.exists():
        save_model(build_model(family_config("qwen3"), seed=0), folder)
    return fsdp_backend(folder, optim=OptimFlags(lr=1e-2, **optim), dtype=dtype)


@pytest.fixture(params=["fake", "fsdp-fp32", "fsdp-bf16", "fsdp-sgd"])
def make(request, tmp_path):
    match request.param:
        case "fake":
            return FakeBackend
        case "fsdp-fp32":
            return lambda: fsdp(tmp_path / "model", dtype=torch.float32)
        case "fsdp-bf16":
            return lambda: fsdp(tmp_path / "model", dtype=torch.bfloat16)
        case "fsdp-sgd":
            return lambda: fsdp(tmp_path / "model", dtype=torch.float32, optimizer="sgd")


def micro(rows=ROWS):
    weights = np.linspace(0.01, 0.05, len(BATCH.loss_masks), dtype=np.float32)
    part = pack_micro_batch(BATCH, rows, weights)
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(len(BATCH.loss_masks), generator=generator)
    starts = BATCH.response_starts
    return part.with_columns(advantages=torch.cat([whole[starts[r] : starts[r + 1]] for r in rows]))


def loss():
    return PolicyLoss(AlgoFlags())


def weights_of(backend):
    return {name: checksum(tensor) for name, tensor in backend.named_weights()}


def test_log_probs_are_those_that_the_loss_sees(make):
    backend = make()
    seen = {}

    def spy(micro, stats):
        seen["log_probs"] = stats.log_probs_R.detach()
        return inner(micro, stats)

    inner = loss()
    spy.needs_entropy, spy.entropy_grad, spy.needs_logits = True, False, False
    stats = backend.log_probs(micro(), entropy=True)
    backend.forward_backward(micro(), spy)
    assert stats.log_probs_R.dtype == torch.float32
    assert not stats.log_probs_R.requires_grad
    assert torch.equal(stats.log_probs_R, seen["log_probs"])
    assert (stats.log_probs_R <= 0).all()
    assert (stats.entropy_R >= 0).all()


def test_losses_of_micro_batches_add_up_to_the_loss_of_the_whole(make):
    whole = make().forward_backward(micro(), loss())
    backend = make()
    parts = merge(backend.forward_backward(micro(rows), loss()) for rows in np.array_split(ROWS, 3))
    assert parts["loss"].value == pytest.approx(whole["loss"].value, rel=2e-2, abs=1e-4)


def test_a_step_changes_the_weights_and_zeroes_the_gradient(make):
    backend = make()
    before = weights_of(backend)
    backend.forward_backward(micro(), loss())
    report = backend.optim_step()
    after = weights_of(backend)
    assert report.grad_norm > 0
    assert report.lr > 0
    assert not report.skipped
    assert before != after
    assert backend.optim_step().grad_norm == 0.0


def test_the_same_steps_give_the_same_bits(make):
    def run():
        backend = make()
        for _ in range(2):
            backend.forward_backward(micro(), loss())
            backend.optim_step()
        return weights_of(backend)

    assert run() == run()


def test_names_of_the_weights_come_in_a_fixed_order(make):
    backend = make()
    assert [n for n, _ in backend.named_weights()] == [n for n, _ in backend.named_weights()]
    assert all(not tensor.requires_grad for _, tensor in backend.named_weights())


def test_the_reference_stays_while_the_policy_moves_and_can_be_refreshed(make):
    backend = make()
    start = backend.log_probs(micro()).log_probs_R
    backend.forward_backward(micro(), loss())
    backend.optim_step()
    assert torch.equal(backend.log_probs(micro(), model="ref").log_probs_R, start)
    backend.copy_weights("actor", "ref")
    assert torch.equal(backend.log_probs(micro(), model="ref").log_probs_R, backend.log_probs(micro()).log_probs_R)


def test_a_model_that_is_not_there_is_an_error(make):
    with pytest.raises(TrainerError, match="old_actor"):
        make().log_probs(micro(), model="old_actor")
    with pytest.raises(TrainerError, match="actor"):
        make().copy_weights("ref", "actor")


def test_a_restored_backend_continues_bit_for_bit(make, tmp_path):
    def steps(backend, count):
        for _ in range(count):
            backend.forward_backward(micro(), loss())
            backend.optim_step()

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    straight = make()
    steps(straight, 2)
    straight.copy_weights("actor", "ref")
    straight.save(folder)
    (late := tmp_path / "late").mkdir()
    straight.save(late, held := PendingFiles())
    assert not list(late.iterdir())
    steps(straight, 2)
    straight.copy_weights("actor", "old_actor")
    torch.rand(1)
    held.write()
    assert {p.name: p.read_bytes() for p in late.iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()}

    resumed = make()
    steps(resumed, 1)
    resumed.load(folder)
    steps(resumed, 2)
    assert weights_of(resumed) == weights_of(straight)
    assert torch.equal(
        resumed.log_probs(micro(), model="ref").log_probs_R, straight.log_probs(micro(), model="ref").log_probs_R
    )


def test_loading_a_folder_that_is_not_a_checkpoint_is_an_error(make, tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint|trainer\.json"):
        make().load(tmp_path)


def test_a_saved_model_folder_has_config_and_weights(make, tmp_path):
    make().save_hf(tmp_path / "hf")
    assert (tmp_path / "hf" / "config.json").is_file()
    assert (tmp_path / "hf" / "model.safetensors").is_file()
