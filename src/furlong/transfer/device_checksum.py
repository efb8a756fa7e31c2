"""The checksum that SGLang 0.5.16 reports at /weights_checker, computed on the tensor's device.

The bytes are 32-bit words, zero-padded. Word v at index i gives two hashes fmix32(v ^ p(i)) with two functions p of the
index, summed over tiles of 8192 words modulo 2^32. Each sum is mixed with the number of bytes, and the two form a
64-bit value per tile. These are summed modulo 2^64 and finalized with splitmix64. fmix32 is from Austin Appleby's
MurmurHash3. The checksum detects errors; it does not protect against an adversary.

Only 8 bytes per tensor are copied to the host, in one copy. On CUDA one kernel launch reads many tensors; elsewhere
torch integer operations are used, which wrap around as required.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from furlong.core.weights import checksum

logger = logging.getLogger(__name__)

WORD_BYTES = 4
TILE_WORDS = 8192
WORD = (1 << 32) - 1
FMIX = (0x85EBCA6B, 0xC2B2AE35)
SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & WORD)
STEPS = (0x27D4EB2D, 0x165667B1)  # factors of the index
TURNS = (15, 13)  # bits by which the index is rotated
KERNEL_CONSTANTS = {"TILE": TILE_WORDS} | {
    f"{name}_{hash}": value
    for name, pair in (("FMIX", FMIX), ("SEED", SEEDS), ("STEP", STEPS), ("TURN", TURNS))
    for hash, value in zip("AB", pair, strict=True)
}
FLUSH_BYTES = 512 << 20  # most bytes kept alive for a later flush; a larger tensor is read immediately
CHUNK_TILES = 256  # per operation without the kernel: 8 MiB of words, and a few times that for temporaries


class Checksums:
    """Collects checksums of many tensors; `digests` synchronizes with the device once.

    `add` reads nothing. `flush` launches the reads of everything added so far, on the current stream of each device;
    `add` calls it once `flush_bytes` are waiting (never if None), and so does `digests`. Tensors must not change before
    they are flushed. On a GPU, later work on the same stream may overwrite them.

    Pieces of a tensor may be added in any order and across flushes: the contribution of a word depends only on its
    position in the tensor.

    Example:
        sums = Checksums()
        sums.add("qkv_proj.weight", [q, k, v])
        sums.add_piece("experts.w2_weight", down, 3 * down.nbytes)  # the fourth expert's
        sums.digests()["qkv_proj.weight"]  # "65ece44f877ab403"
    """

    def __init__(self, *, flush_bytes: int | None = FLUSH_BYTES) -> None:
        self._flush_bytes = flush_bytes
        self._names: list[str] = []
        self._in_pieces: dict[str, int] = {}  # index in `_names`
        self._waiting: dict[torch.device, _Table] = {}
        self._read: list[tuple[list[_Run], Tensor]] = []

    def add(self, name: str, parts: Sequence[Tensor]) -> None:
        """Add a tensor, given as parts that are concatenated along the first axis."""
        if len(parts) > 1 and any(part.nbytes % WORD_BYTES for part in parts[:-1]):  # a word would span two parts
            parts = [torch.cat([part.detach().reshape(-1) for part in parts])]
        self._names.append(name)
        self._wait(len(self._names) - 1, parts)

    def add_piece(self, name: str, piece: Tensor, first_byte: int) -> None:
        """Add the piece of a tensor that starts at `first_byte`. Pieces must not overlap.

        Raises ValueError if the piece does not start at a word boundary.
        """
        if first_byte % WORD_BYTES:
            raise ValueError(f"a piece of {name} starts at byte {first_byte}, not a multiple of {WORD_BYTES}")
        if name not in self._in_pieces:
            self._in_pieces[name] = len(self._names)
            self._names.append(name)
        self._wait(self._in_pieces[name], [piece], first_byte // WORD_BYTES)

    def flush(self) -> None:
        """Launch the reads of all waiting tensors."""
        for device, table in self._waiting.items():
            self._read.append((table.runs, table.tile_sums(device)))
        self._waiting.clear()

    def digests(self) -> dict[str, str]:
        """Return the checksums of all tensors, 16 hex digits each."""
        self.flush()
        if not self._read:
            return {}
        device = self._read[0][1].device
        sums = torch.cat([sums.to(device) for _, sums in self._read])
        totals = _totals(sums, [run for runs, _ in self._read for run in runs], len(self._names))
        return {name: f"{_splitmix64(total):016x}" for name, total in zip(self._names, totals, strict=True)}

    def _wait(self, tensor: int, parts: Sequence[Tensor], first: int = 0) -> None:
        device = parts[0].device
        if device not in self._waiting:
            self._waiting[device] = _Table()
        self._waiting[device].add(tensor, [_whole_words(part) for part in parts], first)
        waiting_bytes = sum(table.num_bytes for table in self._waiting.values())
        if self._flush_bytes is not None and waiting_bytes >= self._flush_bytes:
            self.flush()


class _Run(NamedTuple):
    """Consecutive tiles of a tensor, starting at `first_tile`, and the bytes of them that were added."""

    tensor: int
    first_tile: int
    num_tiles: int
    num_bytes: int


class _Table:
    """The input of one launch: parts of tensors on one device, and the rows of the result for their tiles.

    A row of `rows` is a part: address, index of its first word in its tensor, number of words, result row of the
    tensor's tile 0 (which may be virtual), and the number of programs of earlier parts. A part has one program per tile
    that it touches; `num_programs` is their total. Two parts may share a tile.
    """

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.parts: list[Tensor] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.num_bytes = self.num_tiles = self.num_programs = 0

    def add(self, tensor: int, parts: Sequence[Tensor], first: int = 0) -> None:
        """Append consecutive parts of a tensor, from word `first` on; each is contiguous and of whole words."""
        first_tile, start = first // TILE_WORDS, first
        for part in parts:
            words = part.nbytes // WORD_BYTES
            if words:
                self.rows.append((part.data_ptr(), start, words, self.num_tiles - first_tile, self.num_programs))
                self.parts.append(part)
                self.num_programs += -(-(start + words) // TILE_WORDS) - start // TILE_WORDS
            start += words
        num_tiles, num_bytes = -(-start // TILE_WORDS) - first_tile, WORD_BYTES * (start - first)
        self.runs.append(_Run(tensor, first_tile, num_tiles, num_bytes))
        self.num_tiles += num_tiles
        self.num_bytes += num_bytes

    def tile_sums(self, device: torch.device) -> Tensor:
        """Return two sums modulo 2^32 per tile, int32 [tiles, 2]."""
        sums = torch.zeros((self.num_tiles, 2), dtype=torch.int32, device=device)
        if not self.parts:
            return sums
        if device.type == "cuda" and is_kernel_usable():
            from furlong.transfer.checksum_kernel import add_tile_sums

            add_tile_sums(sums, self.rows, self.num_programs, KERNEL_CONSTANTS)
        else:
            plain_add_tile_sums(sums, self.rows, self.parts)
        return sums


class LocalChecksums:
    """Checksums within one process: GPU tensors on the GPU, host tensors with `core.weights.checksum`.

    Only comparable between tensors on the same device.
    """

    def __init__(self) -> None:
        self._on_device = Checksums()
        self._on_host: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which must not change before `digests`."""
        if tensor.is_cuda:
            self._on_device.add(name, [tensor])
        else:
            self._on_host[name] = checksum(tensor)

    def digests(self) -> dict[str, str]:
        """Return the checksums of all tensors."""
        return self._on_host | self._on_device.digests()


def _whole_words(tensor: Tensor) -> Tensor:
    """Return the bytes as whole, aligned words; no copy if they already are."""
    if tensor.is_contiguous() and tensor.nbytes % WORD_BYTES == 0 and tensor.data_ptr() % WORD_BYTES == 0:
        return tensor  # avoids torch operations, each of which may release the GIL
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    padded = flat.new_zeros(flat.numel() + -flat.numel() % WORD_BYTES)
    padded[: flat.numel()] = flat
    return padded


def plain_add_tile_sums(sums: Tensor, rows: Sequence[tuple[int, int, int, int, int]], parts: Sequence[Tensor]) -> None:
    """Add the tile sums of a `_Table`'s parts to `sums` with torch operations, on any device."""
    for part, (_, first, _, row, _) in zip(parts, rows, strict=True):
        words = _as_int32(part)
        whole = range(min(-first % TILE_WORDS, words.numel()), words.numel(), CHUNK_TILES * TILE_WORDS)
        for start, end in itertools.pairwise(sorted({0, *whole, words.numel()})):
            part_sums = _plain_tile_sums(words[start:end], first + start)
            at = row + (first + start) // TILE_WORDS
            sums[at : at + len(part_sums)] += part_sums


def _as_int32(part: Tensor) -> Tensor:
    flat = part.detach().view(-1).view(torch.uint8)
    return (flat.clone() if flat.storage_offset() % WORD_BYTES else flat).view(torch.int32)


def _plain_tile_sums(words: Tensor, first: int) -> Tensor:
    """Return the tile sums of words that start at a tile boundary or lie within one tile."""
    index = torch.arange(first, first + words.numel(), device=words.device).to(torch.int32)
    columns: list[Tensor] = []
    for step, seed, turn in zip(STEPS, SEEDS, TURNS, strict=True):
        place = (index * _signed(step) + _signed(seed)) ^ ((index << turn) | _shifted(index, 32 - turn))
        mixed = _fmix32(place ^ words)
        whole = words.numel() // TILE_WORDS * TILE_WORDS
        sums = mixed[:whole].view(-1, TILE_WORDS).sum(1, dtype=torch.int32)
        last = mixed[whole:].sum(dtype=torch.int32).view(1)
        columns.append(torch.cat([sums, last]) if whole < words.numel() else sums)
    return torch.stack(columns, 1)


def _totals(sums: Tensor, runs: Sequence[_Run], count: int) -> list[int]:
    """Return the sum of tile values modulo 2^64 for each of `count` tensors; `runs` maps rows of `sums` to tiles."""
    device = sums.device
    num_bytes, num_tiles = [0] * count, [0] * count
    for run in runs:
        num_bytes[run.tensor] += run.num_bytes
        num_tiles[run.tensor] = max(num_tiles[run.tensor], run.first_tile + run.num_tiles)
    first_of = [0, *itertools.accumulate(num_tiles)]
    before = itertools.accumulate((run.num_tiles for run in runs), initial=0)
    moves = [(first_of[run.tensor] + run.first_tile - n, run.num_tiles) for run, n in zip(runs, before, strict=False)]
    by = torch.tensor(moves).to(device)
    places = torch.arange(len(sums), device=device)
    places += torch.repeat_interleave(by[:, 0], by[:, 1], output_size=len(sums))
    tiles = torch.zeros((first_of[-1], 2), dtype=torch.int32, device=device)
    tiles.index_add_(0, places, sums)  # two runs may share a tile

    facts = torch.tensor([(n, _signed(size)) for n, size in zip(num_tiles, num_bytes, strict=True)]).to(device)
    owner = torch.repeat_interleave(torch.arange(count, device=device), facts[:, 0], output_size=len(tiles))
    mixed = _fmix32(tiles ^ facts[:, 1].to(torch.int32)[owner, None]).to(torch.int64)
    values = (mixed[:, 0] << 32) | (mixed[:, 1] & WORD)
    return torch.zeros(count, dtype=torch.int64, device=device).index_add_(0, owner, values).tolist()


def _fmix32(word: Tensor) -> Tensor:
    word = word ^ _shifted(word, 16)
    word = word * _signed(FMIX[0])
    word = word ^ _shifted(word, 13)
    word = word * _signed(FMIX[1])
    return word ^ _shifted(word, 16)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Logical right shift: int32's own shift extends the sign."""
    return (word >> bits) & ((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int32 with the low 32 bits of `value`."""
    value &= WORD
    return value - (1 << 32) if value >> 31 else value


def _splitmix64(value: int) -> int:
    mask = (1 << 64) - 1
    value &= mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


@functools.cache
def is_kernel_usable() -> bool:
    """Return whether the CUDA kernel builds and agrees with torch operations; warns once if not."""
    if importlib.util.find_spec("triton") is None:
        logger.warning("GPU weight checksums are slow: the package triton is not installed")
        return False
    table = _Table()
    words = torch.arange(3 * TILE_WORDS + 77, dtype=torch.int32, device="cuda") * 0x01000193
    table.add(0, [words[: TILE_WORDS + 5], words[TILE_WORDS + 5 :]])
    table.add(1, [words[1:]])
    table.add(2, [words[2:]], first=5 * TILE_WORDS + 9)
    expected = torch.zeros((table.num_tiles, 2), dtype=torch.int32, device="cuda")
    actual = expected.clone()
    plain_add_tile_sums(expected, table.rows, table.parts)
    try:
        from furlong.transfer.checksum_kernel import add_tile_sums

        add_tile_sums(actual, table.rows, table.num_programs, KERNEL_CONSTANTS)
    except Exception as error:  # noqa: BLE001  Triton and its compilers raise many types
        logger.warning("GPU weight checksums are slow: the kernel could not be built: %s", error)
        return False
    if torch.equal(actual, expected):
        return True
    logger.warning("GPU weight checksums are slow: the kernel is wrong on this GPU; please report it")
    return False
