"""Checksums computed by the GPU kernel equal those computed by torch operations on the host."""

from __future__ import annotations

import pytest
import torch

from fakes_sglang import device_checksum, engine_checksums, held_by
from furlong.core.weights import EngineSharding, WeightSource
from furlong.sglang_layout.layout_checksums import expected
from furlong.transfer.device_checksum import TILE_WORDS, Checksums, is_kernel_usable
from furlong.weight_sync.weight_record import WeightRecord

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_kernel_is_built_and_agrees():
    assert is_kernel_usable()


@pytest.mark.parametrize("size", [0, 1, 3, 2 * TILE_WORDS, 2 * TILE_WORDS + 1, 1_000_003])
def test_the_gpu_has_the_checksum_of_the_host(size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16()
    assert device_checksum(tensor.cuda()) == device_checksum(tensor)


@pytest.mark.parametrize("rows", [(4, 2, 2), (3, 5, 1)], ids=["whole tiles", "others"])
def test_parts_have_the_checksum_of_the_whole_on_both(rows):
    parts = [torch.randn(each, 4096 if sum(rows) == 8 else 77).repeat(8, 1) for each in rows]
    found = []
    for device in ("cpu", "cuda"):
        sums = Checksums()
        sums.add("parts", [part.to(device) for part in parts])
        sums.add("whole", [torch.cat(parts).to(device)])
        found += sums.digests().values()
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "sizes", [(3, 6, 10), (4, 100, 334), (5, 768, 2048)], ids=["in a tile", "across tiles", "whole tiles"]
)
def test_experts_one_by_one_have_the_checksums_of_the_tensors_that_they_make(sizes):
    num_experts, width, hidden = sizes
    state = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": torch.randn(shape, device="cuda").bfloat16()
        for expert in range(num_experts)
        for name, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        )
    }
    right = engine_checksums({name: tensor.cpu() for name, tensor in state.items()})
    assert engine_checksums(state) == right
    for is_live in (True, False):
        sent = WeightRecord(frozenset(), keep_rows=True, device_dtypes=frozenset([torch.bfloat16]))
        for _ in sent.recording(WeightSource(lambda: reversed(state.items()), is_live=is_live)).open():
            pass
        sent.finish()
        assert sent.checksums == right
        assert (sent.wrong, sent.unhashed) == ({}, {})


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize(("width", "num_kv_heads"), [(1024, 2), (334, 8), (77, 1)])
def test_every_process_has_the_checksums_of_its_share(width, num_kv_heads, is_live):
    shapes = {
        "model.embed_tokens.weight": (1000, width), "lm_head.weight": (1000, width), "model.norm.weight": (width,),
        "model.layers.0.self_attn.q_proj.weight": (512, width), "model.layers.0.self_attn.o_proj.weight": (width, 512),
        "model.layers.0.self_attn.k_proj.weight": (num_kv_heads * 64, width),
        "model.layers.0.self_attn.v_proj.weight": (num_kv_heads * 64, width),
        "model.layers.0.mlp.gate_proj.weight": (1536, width), "model.layers.0.mlp.up_proj.weight": (1536, width),
        "model.layers.0.mlp.down_proj.weight": (width, 1536),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    state = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    given = {name: tensor.cuda() for name, tensor in state.items()}
    layouts = [EngineSharding(4, 4, 4), EngineSharding(4, 2, 4), EngineSharding(2, 1, 2)]
    sent = WeightRecord(frozenset(), True, frozenset([torch.bfloat16]), frozenset(layouts))
    source = WeightSource(given.items, is_live=is_live, num_kv_heads=num_kv_heads)
    for _ in sent.recording(source).open():
        pass
    for tensor in given.values():  # the next optimizer step
        tensor.zero_()
    sent.finish()
    assert not sent.unknown_tp_sizes
    for layout in layouts:
        for rank in range(layout.tp_size):
            held = held_by(
                rank, state, num_kv_heads=num_kv_heads, tp_size=layout.tp_size, attn_tp_size=layout.attention_tp_size,
                head_tp_size=layout.head_tp_size,
            )  # fmt: skip
            right = {name: device_checksum(tensor) for name, tensor in held.items()}
            assert expected(sent.fused, right, layout, rank) == right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_many_tensors_of_one_launch_have_the_checksums_of_the_host(dtype):
    generator = torch.Generator().manual_seed(1)
    sizes = [0, 1, 2, 3, 5, TILE_WORDS - 1, TILE_WORDS, 4 * TILE_WORDS + 2, 300_001] * 30
    found = {"cpu": Checksums(), "cuda": Checksums(flush_bytes=None)}
    for number, size in enumerate(sizes):
        parts = [torch.randn(each, 2, generator=generator).mul(50).to(dtype) for each in (size, 2, size // 2)]
        for device, sums in found.items():
            sums.add(str(number), [part.to(device) for part in parts])
    assert found["cpu"].digests() == found["cuda"].digests()


def test_views_at_odd_offsets_and_strided_tensors_have_the_checksums_of_the_host():
    whole = torch.randn(4099, 66, generator=torch.Generator().manual_seed(2)).bfloat16()
    for view in (lambda t: t.view(-1)[1:], lambda t: t.view(-1)[2:-1], lambda t: t.t(), lambda t: t[:, 3:40]):
        assert device_checksum(view(whole.cuda())) == device_checksum(view(whole))


def test_the_record_of_a_weight_update_is_of_the_sent_values_although_memory_is_reused():
    sent = WeightRecord(frozenset(), keep_rows=True, device_dtypes=frozenset([torch.bfloat16]))
    given = {f"model.layers.{i}.mlp.down_proj.weight": i for i in range(12)}

    def gathered():
        for name, i in given.items():  # as in a sharded model: built on demand, then freed
            yield name, torch.full((64 << 20,), i, dtype=torch.bfloat16, device="cuda")

    for _ in sent.recording(WeightSource(gathered)).open():
        pass
    sent.finish()
    for name, i in given.items():
        assert sent.checksums[name] == device_checksum(torch.full((64 << 20,), i, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("is_live", [True, False])
def test_weights_may_change_and_go_as_soon_as_they_were_sent(is_live):
    sent = WeightRecord(frozenset(), keep_rows=True, device_dtypes=frozenset([torch.bfloat16]))
    state = {
        f"model.layers.{i}.mlp.down_proj.weight": torch.randn(48 << 20, device="cuda").bfloat16() for i in range(8)
    }
    right = {name: device_checksum(tensor) for name, tensor in state.items()}
    rows = {name: tensor[:2].cpu() for name, tensor in state.items()}
    for _ in sent.recording(WeightSource(state.items, is_live=is_live)).open():
        pass
    for tensor in state.values():  # the next optimizer step, and the trainer's sleep
        tensor.zero_()
    del tensor
    state.clear()
    torch.cuda.empty_cache()
    torch.full((400 << 20,), 7, dtype=torch.bfloat16, device="cuda")
    sent.finish()
    assert sent.checksums == right
    assert all(torch.equal(found, rows[name]) for name, found in sent.rows.items())
