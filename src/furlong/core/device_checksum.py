"""A checksum of tensors that is computed where they are: what SGLang 0.5.16 answers to /weights_checker.

The bytes are 32-bit words, zeros filling up the last. Word v at index i gives two hashes fmix32(v ^ p(i)) with two
functions p of the index. They are added up in tiles of 8192 words modulo 2^32; each sum is mixed with the number of
bytes, and the two make a 64-bit value. The tiles' values are added modulo 2^64, and splitmix64's last steps mix the
sum. fmix32 is MurmurHash3's, of Austin Appleby. It finds errors; it is no protection against an adversary.

Nothing is copied to the host but 8 bytes per tensor, all at once. `Checksums` makes a table of the tensors; on CUDA a
launch of a kernel reads all of them, elsewhere torch's integer operations do, which wrap around as the definition
wants.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

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
FLUSH_BYTES = 512 << 20  # the most that is kept from being freed for later reading; a larger tensor is read at once
CHUNK_TILES = 256  # at a time without the kernel: 8 MiB of words, and a few times that in between


class Checksums:
    """Collects checksums of many tensors; `digests` waits for the device once.

    `add` reads nothing yet. `flush` has everything added so far read by one launch on each device, in the order of the
    current stream; it is called by `add` once `flush_bytes` wait (never, if that is None) and by `digests`. Until then
    the tensors must stay as they are. On a GPU what is put on the same stream after `flush` may overwrite them.

    Of a tensor that nobody has whole, pieces may be added in any order, before and after a `flush`: what a word adds
    depends on its place in the tensor alone.

    Example:
        sums = Checksums()
        sums.add("qkv_proj.weight", [q, k, v])
        sums.add_piece("experts.w2_weight", down, 3 * down.nbytes)  # the fourth expert's
        sums.digests()["qkv_proj.weight"]  # "65ece44f877ab403"
    """

    def __init__(self, *, flush_bytes: int | None = FLUSH_BYTES) -> None:
        self._flush_bytes = flush_bytes
        self._names: list[str] = []
        self._in_pieces: dict[str, int] = {}  # places in `_names`
        self._waiting: dict[torch.device, _Table] = {}
        self._read: list[tuple[list[_Run], Tensor]] = []

    def add(self, name: str, parts: Sequence[Tensor]) -> None:
        """Take one tensor, given as parts that are concatenated along the first axis."""
        if any(part.nbytes % WORD_BYTES for part in parts[:-1]):  # a word has bytes of two of them
            parts = [torch.cat([part.detach().reshape(-1) for part in parts])]
        self._names.append(name)
        self._wait(len(self._names) - 1, parts)

    def add_piece(self, name: str, piece: Tensor, first_byte: int) -> None:
        """Take the piece of a tensor that begins at this byte of it. Those that come later must not overlap.

        Raises ValueError for a piece that begins within a word: what it has of that word has no hash.
        """
        if first_byte % WORD_BYTES:
            raise ValueError(f"a piece of {name} begins at byte {first_byte}, which is within a word of {WORD_BYTES}")
        if name not in self._in_pieces:
            self._in_pieces[name] = len(self._names)
            self._names.append(name)
        self._wait(self._in_pieces[name], [piece], first_byte // WORD_BYTES)

    @property
    def waiting(self) -> list[Tensor]:
        """The tensors that `flush` will read."""
        return [part for table in self._waiting.values() for part in table.parts]

    @property
    def waiting_bytes(self) -> int:
        """Their bytes."""
        return sum(table.num_bytes for table in self._waiting.values())

    def prepare(self) -> None:
        """Have the kernel built that `flush` launches, if it needs one: a second, the first time."""
        if any(device.type == "cuda" for device in self._waiting):
            is_kernel_usable()

    def flush(self) -> None:
        """Have the device read what waits."""
        for device, table in self._waiting.items():
            self._read.append((table.runs, table.tile_sums(device)))
        self._waiting.clear()

    def digests(self) -> dict[str, str]:
        """The checksums of all tensors added, 16 hex digits each."""
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
        if self._flush_bytes is not None and self.waiting_bytes >= self._flush_bytes:
            self.flush()


@dataclass(frozen=True)
class _Run:
    """Consecutive tiles of one of the tensors, from `first_tile` on, of which parts have this many bytes."""

    tensor: int
    first_tile: int
    num_tiles: int
    num_bytes: int


class _Table:
    """What one launch reads: parts of tensors of one device, and in which rows of the result their tiles are summed up.

    A row of `rows` is a part: address, index of its first word in its tensor, words, row that the tensor's first tile
    has or would have, and how many tiles the parts before it have words of (`num_programs` for all). Two parts may
    share a tile.
    """

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.parts: list[Tensor] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.num_bytes = self.num_tiles = self.num_programs = 0

    def add(self, tensor: int, parts: Sequence[Tensor], first: int = 0) -> None:
        """Append parts of a tensor that follow each other from its word `first` on, contiguous and of whole words."""
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
        """Two sums modulo 2^32 for each tile, int32 [tiles, 2]."""
        sums = torch.zeros((self.num_tiles, 2), dtype=torch.int32, device=device)
        if not self.parts:
            return sums
        if device.type == "cuda" and is_kernel_usable():
            from furlong.core.checksum_kernel import add_tile_sums

            add_tile_sums(sums, self.rows, self.num_programs)
        else:
            plain_add_tile_sums(sums, self.rows, self.parts)
        return sums


class LocalChecksums:
    """Checksums of tensors where they are: on a GPU by the GPU, in host memory by `core.weights.checksum`.

    They compare tensors of one process, of which both sides are on one device.
    """

    def __init__(self) -> None:
        self._on_device = Checksums()
        self._found: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, which stays as it is until `digests`."""
        if tensor.is_cuda:
            self._on_device.add(name, [tensor])
        else:
            self._found[name] = checksum(tensor)

    def digests(self) -> dict[str, str]:
        """The checksums of all tensors added."""
        return self._found | self._on_device.digests()


def _whole_words(tensor: Tensor) -> Tensor:
    """A tensor of the same bytes at an address of words, which is no copy where they lie so already."""
    if tensor.is_contiguous() and tensor.nbytes % WORD_BYTES == 0 and tensor.data_ptr() % WORD_BYTES == 0:
        return tensor  # no operation of torch's so far: each would let another thread go first
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    padded = flat.new_zeros(flat.numel() + -flat.numel() % WORD_BYTES)
    padded[: flat.numel()] = flat
    return padded


def plain_add_tile_sums(sums: Tensor, rows: Sequence[tuple[int, int, int, int, int]], parts: Sequence[Tensor]) -> None:
    """Add the sums of a `_Table`'s parts to those of their tiles, by torch's operations, on any device."""
    for part, (_, first, _, row, _) in zip(parts, rows, strict=True):
        words = _as_int32(part)
        whole = range(min(-first % TILE_WORDS, words.numel()), words.numel(), CHUNK_TILES * TILE_WORDS)
        for start, end in itertools.pairwise(sorted({0, *whole, words.numel()})):
            found = _plain_tile_sums(words[start:end], first + start)
            at = row + (first + start) // TILE_WORDS
            sums[at : at + len(found)] += found


def _as_int32(part: Tensor) -> Tensor:
    flat = part.detach().view(-1).view(torch.uint8)
    return (flat.clone() if flat.storage_offset() % WORD_BYTES else flat).view(torch.int32)


def _plain_tile_sums(words: Tensor, first: int) -> Tensor:
    """Sums of words that begin with a tile, or are part of one."""
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
    """Sums of the tiles' values modulo 2^64, one for each of `count` tensors, of which these are the runs' tiles."""
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
    """Shift right, zeros coming in: int32's own shift repeats the sign."""
    return (word >> bits) & ((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """The int32 of the same bits as the last 32 of `value`."""
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
    """Whether the CUDA kernel can be built and agrees with torch's operations, tried once; a warning says if not."""
    if importlib.util.find_spec("triton") is None:
        logger.warning("checksums of weights on the GPU take longer: the package triton is not installed")
        return False
    table = _Table()
    words = torch.arange(3 * TILE_WORDS + 77, dtype=torch.int32, device="cuda") * 0x01000193
    table.add(0, [words[: TILE_WORDS + 5], words[TILE_WORDS + 5 :]])
    table.add(1, [words[1:]])
    table.add(2, [words[2:]], first=5 * TILE_WORDS + 9)
    right = torch.zeros((table.num_tiles, 2), dtype=torch.int32, device="cuda")
    found = right.clone()
    plain_add_tile_sums(right, table.rows, table.parts)
    try:
        from furlong.core.checksum_kernel import add_tile_sums

        add_tile_sums(found, table.rows, table.num_programs)
    except Exception as error:  # noqa: BLE001  Triton has many, and those of the compilers that it starts
        logger.warning("checksums of weights on the GPU take longer: the kernel was not built: %s", error)
        return False
    if torch.equal(found, right):
        return True
    logger.warning("checksums of weights on the GPU take longer: the kernel is wrong on this GPU, please report it")
    return False
