"""What a GPU can do to a run: its memory ends while it trains, and the same flags give the same bits."""

from __future__ import annotations

import re

import pytest
import torch
from tests.runs import flags, train, write_model, write_prompts

from furlong.trainers.fsdp import FsdpBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_gpu_without_memory_ends_a_run_with_the_phase_and_the_smallest_change(tmp_path, monkeypatch):
    forward_backward, taken = FsdpBackend.forward_backward, []

    def after_all_was_taken(self, micro, loss_fn):
        torch.cuda.synchronize()
        for power in range(36, 8, -1):
            try:
                while True:
                    taken.append(torch.empty(1 << power, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                continue
        return forward_backward(self, micro, loss_fn)

    monkeypatch.setattr(FsdpBackend, "forward_backward", after_all_was_taken)
    words = {"max_tokens_per_gpu": 512, "use_dynamic_batch_size": True}
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
            train(flags(write_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl"), tmp_path / "run", **words))
    finally:
        taken.clear()
        torch.cuda.empty_cache()
    note = next(note for note in caught.value.__notes__ if "MEM02" in note)
    assert "[MEM02] out of memory in forward and backward of training (tried " in note
    assert "; predicted " in note
    assert re.search(r"--max-tokens-per-gpu \d+$", note)
    assert "[MEM02]" in (tmp_path / "run" / "run.log").read_text()


def test_deterministic_runs_are_equal_bit_for_bit(tmp_path):
    model, prompts = write_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    for name in ("first", "second"):
        words = {"deterministic_mode": True, "save": tmp_path / name / "saved", "save_interval": 2}
        train(flags(model, prompts, tmp_path / name, **words))
    weights = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "saved").rglob("*.safetensors")}
        for name in ("first", "second")
    ]
    assert weights[0]
    assert weights[0] == weights[1]
