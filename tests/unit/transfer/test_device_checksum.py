"""The checksum that SGLang computes on its GPU: its own answers for the quickstart's model, and a slow oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import furlong
from fakes_sglang import device_checksum
from furlong.inference.embedded.model_loading import source_from_folder
from furlong.sglang_layout.layout_checksums import WHOLE, LayoutChecksums
from furlong.transfer.device_checksum import TILE_WORDS, Checksums, _Table

# /weights_checker of SGLang 0.5.16 on an H200, serving the quickstart's model.
ANSWERED = {
    "model.embed_tokens.weight": "9ba8a227168e5724",
    "model.layers.0.self_attn.q_norm.weight": "a4fd009309a4c580",
    "model.layers.0.self_attn.k_norm.weight": "70a7371603deb5ec",
    "model.layers.0.self_attn.qkv_proj.weight": "65ece44f877ab403",
    "model.layers.0.self_attn.o_proj.weight": "fcea764a2076a0dd",
    "model.layers.0.mlp.gate_up_proj.weight": "e46db0c5fcb6c89f",
    "model.layers.0.mlp.down_proj.weight": "b8e94ad1b893af5a",
    "model.layers.0.input_layernorm.weight": "e7290a99f854f018",
    "model.layers.0.post_attention_layernorm.weight": "38d0a58eac9dce5a",
    "model.layers.1.self_attn.qkv_proj.weight": "9d9ebdcc33e719d7",
    "model.layers.2.mlp.gate_up_proj.weight": "0d32afb68649fa40",
    "model.layers.3.self_attn.q_norm.weight": "fd96b7e653ad8a0e",
}
WORD, WORD64 = (1 << 32) - 1, (1 << 64) - 1


def test_checksums_of_the_quickstart_model_equal_those_of_sglang():
    sums = LayoutChecksums(frozenset([torch.bfloat16, torch.float32]))
    for name, tensor in source_from_folder(Path(furlong.__file__).parent / "quickstart" / "model").open():
        sums.add(name, tensor)
    result = sums.digests()[WHOLE]
    assert len(result) == 1 + 5 * 8 + 1
    assert {name: result[name] for name in ANSWERED} == {name: [digest] for name, digest in ANSWERED.items()}


def fmix(x):
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def oracle(data):
    """The definition, word by word."""
    data = data + bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    seed = 0x243F6A88
    other = (seed * 0x9E3779B1 ^ 0xDEADBEEF) & WORD
    total = 0
    for start in range(0, len(words), 8192):
        a = b = 0
        for i in range(start, min(start + 8192, len(words))):
            a += fmix(words[i] ^ (i * 0x27D4EB2D + seed & WORD) ^ (i << 15 & WORD | i >> 17))
            b += fmix(words[i] ^ (i * 0x165667B1 + other & WORD) ^ (i << 13 & WORD | i >> 19))
        total += fmix(a & WORD ^ len(data)) << 32 | fmix(b & WORD ^ len(data))
    x = total & WORD64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD64
    return f"{x ^ x >> 31:016x}"


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 3, 4, 7, 4 * TILE_WORDS, 4 * TILE_WORDS + 2, 8 * TILE_WORDS + 41])
def test_checksum_equals_a_slow_implementation_of_the_definition(num_bytes):
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    assert device_checksum(data) == oracle(bytes(data.tolist()))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 6, 2 * TILE_WORDS - 2, 8 * TILE_WORDS]), min_size=1, max_size=5), st.booleans()
)
def test_parts_have_the_checksum_of_the_whole(sizes, is_strided):
    generator = torch.Generator().manual_seed(sum(sizes))
    parts = [torch.randint(0, 256, (size, 2), dtype=torch.uint8, generator=generator) for size in sizes]
    if is_strided:
        parts = [part.t().contiguous().t() for part in parts]
    sums = Checksums()
    sums.add("parts", parts)
    sums.add("whole", [torch.cat(parts)])
    result = sums.digests()
    assert result["parts"] == result["whole"]


def test_one_bit_changes_a_checksum_and_a_view_at_an_odd_offset_does_not():
    tensor = torch.randn(300, 70).to(torch.bfloat16)
    before = device_checksum(tensor)
    assert device_checksum(torch.cat([tensor.new_zeros(1), tensor.view(-1)])[1:]) == before
    tensor.view(torch.int16)[299, 69] ^= 1
    assert device_checksum(tensor) != before


SIZES = [0, 4, 40, 4 * TILE_WORDS - 4, 4 * TILE_WORDS, 4 * TILE_WORDS + 8, 12 * TILE_WORDS + 4]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3), min_size=1, max_size=6))
def test_launch_table_covers_every_word_once(tensors):
    table, right = _Table(), []
    for number, sizes in enumerate(tensors):
        words = [size // 4 for size in sizes]
        tiles = table.num_tiles + torch.arange(sum(words)) // TILE_WORDS
        right += [each for each in tiles.split(words) if len(each)]
        table.add(number, [torch.zeros(size, dtype=torch.uint8) for size in sizes])
    assert table.num_tiles == sum(-(-sum(sizes) // (4 * TILE_WORDS)) for sizes in tensors)
    programs = [begin for *_, begin in table.rows] + [table.num_programs]
    assert programs[0] == 0
    for index, (want, part, row) in enumerate(zip(right, table.parts, table.rows, strict=True)):
        address, first, count, first_row, begin = row
        assert (address, count) == (part.data_ptr(), len(want))
        result = torch.full((count,), -1)
        for program in range(begin, programs[index + 1]):  # of the kernel; it does this
            tile = first // TILE_WORDS + program - begin
            inside = result[max(tile * TILE_WORDS - first, 0) : (tile + 1) * TILE_WORDS - first]
            assert (inside == -1).all()
            assert len(inside)
            inside.fill_(first_row + tile)
        assert torch.equal(result, want)


def test_checksums_do_not_depend_on_batching():
    generator = torch.Generator().manual_seed(0)
    tensors = {str(size): torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES}
    tensors |= {"odd": torch.arange(33, dtype=torch.int16), "empty": torch.zeros(0)}
    together, in_turn = Checksums(), Checksums(flush_bytes=1)
    for name, tensor in tensors.items():
        together.add(name, [tensor])
        in_turn.add(name, [tensor])
    alone = {name: device_checksum(tensor) for name, tensor in tensors.items()}
    assert together.digests() == in_turn.digests() == alone


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([1, 3, TILE_WORDS - 1, TILE_WORDS, 2 * TILE_WORDS + 5]), min_size=1, max_size=6),
    st.randoms(use_true_random=False), st.sampled_from([1, 8 * TILE_WORDS, None]),
)  # fmt: skip
def test_pieces_in_any_order_have_the_checksum_of_the_whole(sizes, shuffled, flush_bytes):
    whole = torch.randint(-(2**31), 2**31, (sum(sizes),), dtype=torch.int32)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = list(zip(firsts, whole.split(sizes), strict=True))
    shuffled.shuffle(pieces)
    sums = Checksums(flush_bytes=flush_bytes)
    for number, (first, piece) in enumerate(pieces):
        sums.add(f"extra {number}", [piece])
        sums.add_piece("whole", piece, 4 * first)
        sums.add_piece("other", piece ^ 1, 4 * first)
    result = sums.digests()
    assert result["whole"] == device_checksum(whole)
    assert result["other"] == device_checksum(whole ^ 1)
    assert [result[f"extra {number}"] for number in range(len(pieces))] == [device_checksum(each) for _, each in pieces]


def test_an_unaligned_piece_is_rejected():
    with pytest.raises(ValueError, match=r"byte 6, .* 4"):
        Checksums().add_piece("it", torch.zeros(4), 6)


def test_a_tensor_is_read_when_it_is_flushed():
    tensor = torch.arange(TILE_WORDS + 3)
    before, sums = device_checksum(tensor), Checksums()
    sums.add("before", [tensor])
    sums.flush()
    tensor += 1
    sums.add("after", [tensor])
    assert sums.digests() == {"before": before, "after": device_checksum(tensor)}
