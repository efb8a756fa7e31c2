"""The trainer on CUDA: variable-length attention compared with float32 on the CPU, and bitwise reproducible steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends import fsdp_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.core.batch import pack_micro_batch
from furlong.models import hf_model as hf
from models_zoo import FAMILIES, family_config, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BATCH = random_batch(prompts=[9, 4, 30], responses=[[5, 12, 1], [40, 3], [2, 2]])


def build(folder, family, *, device, dtype, share_prompts=True):
    if not folder.exists():
        config = family_config(family)
        config.head_dim = 16
        hf.save_model(hf.build_model(config, seed=3), folder)
    return fsdp_backend(folder, optim=OptimFlags(lr=1e-3), dtype=dtype, device=device, share_prompts=share_prompts)


GROUPS = random_batch(prompts=[60, 50], responses=[[30] * 8, [40] * 8])  # eight responses share each prompt


def run(backend, batch=BATCH):
    count = len(batch.loss_masks)
    weights = np.full(count, 1 / count, np.float32)
    micro = pack_micro_batch(batch, range(len(batch)), weights, device=backend.device)
    micro = micro.with_columns(advantages=torch.linspace(-1, 1, count, device=backend.device))
    log_probs = backend.log_probs(micro).log_probs_R.float().cpu()
    backend.forward_backward(micro, PolicyLoss(AlgoFlags()))
    report = backend.optim_step()
    return log_probs, report.grad_norm, {n: t.float().cpu() for n, t in backend.named_weights()}


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradient_norm_on_cuda_are_those_of_the_cpu(family, dtype, share_prompts, tmp_path):
    want, want_norm, _ = run(build(tmp_path / "m", family, device="cpu", dtype=torch.float32))
    backend = build(tmp_path / "m", family, device="cuda", dtype=dtype, share_prompts=share_prompts)
    got, norm, _ = run(backend)
    exact = dtype is torch.float32
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 if exact else 0.06)
    assert norm == pytest.approx(want_norm, rel=1e-3 if exact else 0.05)


@pytest.mark.parametrize("batch", [BATCH, GROUPS], ids=["few", "groups"])
def test_a_step_on_cuda_repeats_bit_for_bit(batch, tmp_path):
    first, *others = (run(build(tmp_path / "m", "qwen3", device="cuda", dtype=torch.bfloat16), batch) for _ in range(5))
    for other in others:
        assert torch.equal(first[0], other[0])
        assert all(torch.equal(first[2][name], other[2][name]) for name in first[2])


def on_device(backend):
    return [tensor for tensor in backend.resident() if tensor.untyped_storage().size()]


@pytest.mark.parametrize("offload", ["nothing", "moments", "all"])
def test_an_offloaded_trainer_continues_bit_for_bit(offload, tmp_path):
    build(tmp_path / "m", "qwen3", device="cpu", dtype=torch.float32)
    results, kept = [], []
    for sleeps in (False, True):
        backend = fsdp_backend(
            tmp_path / "m", optim=OptimFlags(lr=1e-3), dtype=torch.bfloat16, device="cuda",
            offload_optimizer=offload, freeze_params_name_list=["layers.0"],
        )  # fmt: skip
        for _ in range(3):
            if sleeps:
                before = [tensor.clone() for tensor in on_device(backend)]
                moved = backend.offload()
                kept.append(len(on_device(backend)))
                assert backend.onload().num_bytes == moved.num_bytes
                backend._host.wait_for_deferred()
                assert all(torch.equal(a, b) for a, b in zip(before, on_device(backend), strict=True))
                backend.offload(), backend.onload()  # used at once, while the moments are still copied
            found = run(backend)
        results.append(found)
    assert kept == [0, 0, 0]
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][2][name], results[1][2][name]) for name in results[0][2])
