"""Shared memory between trainer and engine, and what goes to SGLang for CUDA memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from types import SimpleNamespace

import orjson
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from furlong.core.weights import Bucket, WeightSource
from furlong.errors import EngineError, SyncError
from furlong.sglang_layout.quantized_loading import load
from furlong.transfer import shared_memory
from furlong.transfer.shared_memory import SharedBuffer, folder, offsets, open_shared
from furlong.weight_sync.remote_sync import RankSync
from furlong.weight_sync.transports.ipc import IpcTransport, fill, handle_message, in_order_of_parts, quantized_message
from sglang_messages import unpickled
from transport_context import transport_context

TENSORS = [
    ("a", torch.arange(6, dtype=torch.float32).view(2, 3)),
    ("b", torch.ones(3, dtype=torch.bfloat16)),
    ("c", torch.zeros(0, 4)),
    ("d", torch.tensor(7)),
]


def test_tensors_in_a_shared_buffer_are_read_by_their_description():
    buffer = SharedBuffer(2048)
    layout = orjson.loads(orjson.dumps(buffer.fill(TENSORS)))
    loaded = open_shared(buffer.name, layout)
    for (name, tensor), (its_name, its) in zip(TENSORS, loaded, strict=True):
        assert name == its_name
        assert its.dtype == tensor.dtype
        assert torch.equal(its, tensor)
    buffer.close()
    assert not (folder() / buffer.name).exists()
    assert torch.equal(loaded[0][1], TENSORS[0][1])  # the memory lives on


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offset": 1}, "not within"),
        ({"offset": 4096}, "not within"),
        ({"shape": [1 << 40]}, "not within"),
        ({"shape": [-1]}, "not within"),
        ({"dtype": "pickle"}, "pickle"),
        ({"name": None, "shape": None}, "NoneType"),
    ],
)
def test_a_description_of_another_buffer_is_refused(change, words):
    buffer = SharedBuffer(2048)
    (entry, *_) = buffer.fill(TENSORS)
    with pytest.raises(SyncError, match=words):
        open_shared(buffer.name, [entry | change])
    with pytest.raises(SyncError, match="expected a list"):
        open_shared(buffer.name, "x")
    buffer.close()


@pytest.mark.parametrize("name", ["/etc/passwd", "../../etc/passwd", None, "furlong-weights-" + "0" * 32])
def test_only_buffers_of_furlong_are_opened(name):
    with pytest.raises(SyncError, match=r"not the name of a shared buffer|cannot be opened"):
        open_shared(name, [])


def test_a_link_is_not_followed():
    name = "furlong-weights-" + "f" * 32
    (folder() / name).symlink_to("/etc/hostname")
    try:
        with pytest.raises(SyncError, match="cannot be opened"):
            open_shared(name, [])
    finally:
        (folder() / name).unlink()


def test_a_message_to_sglang_names_only_what_its_unpickler_allows():
    """Stock SGLang 0.5.16 refuses every global but those of a list of modules."""
    read = unpickled(handle_message((rebuild_cuda_tensor, ARGUMENTS), "GPU-uuid", BUCKET, [0]))
    assert read["flattened_tensor"] == (*ARGUMENTS[:6], "GPU-uuid", *ARGUMENTS[7:])
    assert read["metadata"] == [ENTRY]


def test_a_message_to_the_loader_of_quantized_weights_is_what_it_loads():
    message = quantized_message((rebuild_cuda_tensor, ARGUMENTS), "GPU-uuid", BUCKET, [0])
    [(header, buffer)] = unpickled(message)
    assert buffer == (*ARGUMENTS[:6], "GPU-uuid", *ARGUMENTS[7:])
    loaded = []
    model = torch.nn.Module()
    model.load_weights = loaded.extend
    load(model, [(header, BUCKET.tensors[0][1].view(-1).view(torch.uint8))])
    [(name, tensor)] = loaded
    assert name == "a"
    assert torch.equal(tensor, BUCKET.tensors[0][1])


def test_stored_shapes_are_sent_to_servers_without_the_loader_only():
    loading, other = (SimpleNamespace(info=SimpleNamespace(has_quantized_loader=loads)) for loads in (True, False))
    transport = IpcTransport(transport_context(800))
    assert not transport.needs_shapes([loading, loading])
    assert transport.needs_shapes([loading, other])


def test_parts_of_weights_that_were_quantized_together_are_copied_together():
    whole = {"weight_packed": torch.arange(192, dtype=torch.int32).view(12, 16), "weight_scale": torch.randn(12, 32)}
    tensors = [("norm.weight", torch.ones(3))]
    for i in range(3):
        tensors += [(f"{i}.{part}", tensor[4 * i : 4 * i + 4]) for part, tensor in whole.items()]
    tensors.append(("t.weight", torch.randn(4, 3).t()))
    ordered = in_order_of_parts(tensors)
    assert [name for name, _ in ordered] == [
        "norm.weight", "t.weight", *(f"{i}.weight_packed" for i in range(3)), *(f"{i}.weight_scale" for i in range(3))
    ]  # fmt: skip
    starts, size = offsets(ordered)
    buffer, copies = torch.zeros(size, dtype=torch.uint8), Copies()
    with copies:
        fill(buffer, [tensor for _, tensor in ordered], starts)
    assert copies.count == 4
    for (_, tensor), start in zip(ordered, starts, strict=True):
        assert torch.equal(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor)


class Copies(TorchDispatchMode):
    """Counts copies."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


ARGUMENTS = (torch.Tensor, torch.Size([8]), (1,), 0, torch.UntypedStorage, torch.uint8, 3, b"handle", 8, 0, False)
BUCKET = Bucket(0, [("a", torch.ones(2, 2, dtype=torch.bfloat16))], is_last=True)
ENTRY = SimpleNamespace(name="a", shape=torch.Size([2, 2]), dtype=torch.bfloat16, start_idx=0, end_idx=8, numel=8)


class Crowd:
    """`RankMessages` within one process: each rank is a thread."""

    def __init__(self, rank, world_size, barrier, board):
        self.rank, self.world_size, self._barrier, self._board = rank, world_size, barrier, board

    def exchange(self, message):
        self._board[self.rank] = message
        self._barrier.wait(10)
        loaded = list(self._board)
        self._barrier.wait(10)
        return loaded


class Shared:
    """A server of two processes that loads what rank `first_rank` describes."""

    checksum_dtype, num_ranks, device_dtypes = torch.float32, 1, frozenset()
    info = SimpleNamespace(is_furlong=True, has_quantized_loader=False)

    def __init__(self, first_rank, fail_at=None):
        self.url, self.first_rank, self.fail_at = f"http://engine{first_rank}", first_rank, fail_at
        self.stored, self.buckets = {}, 0

    async def load_shared(self, name, tensors, version, *, is_last):
        self.buckets += 1
        if self.buckets == self.fail_at:
            raise EngineError("out of memory")
        self.stored |= {name: tensor.clone() for name, tensor in open_shared(name, tensors)}
        self.is_done = is_last


STATE = {f"w{i}": torch.full((100,), float(i)) for i in range(7)}


def publish(servers, world_size):
    barrier, board = threading.Barrier(world_size), [b""] * world_size
    results = [None] * world_size
    read = [0] * world_size

    @contextlib.asynccontextmanager
    async def connecting(addresses):
        yield servers

    def rank_of(rank):
        def weights():
            def opened():
                for name, tensor in STATE.items():
                    read[rank] += 1
                    yield name, tensor

            return WeightSource(opened)

        peers = Crowd(rank, world_size, barrier, board)
        transport = IpcTransport(transport_context(800, timeout=5), peers)
        ranked = RankSync(weights, transport, connect=connecting, rank=rank, world_size=world_size)
        try:
            results[rank] = asyncio.run(ranked.send_weights([], 5))
        except SyncError as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results, read


def test_each_engine_gets_the_buffers_of_the_ranks_on_its_gpus():
    before = set(folder().glob("furlong-weights-*"))  # of other processes
    servers = [Shared(0), Shared(1)]
    results, _ = publish(servers, 2)
    for server in servers:
        assert server.is_done
        assert all(torch.equal(server.stored[name], tensor) for name, tensor in STATE.items())
    assert results[0].num_bytes == 2800
    assert set(folder().glob("furlong-weights-*")) <= before


def test_an_engine_that_fails_is_the_same_error_on_every_rank_and_all_read_to_the_end():
    results, read = publish([Shared(0), Shared(1, fail_at=2)], 2)
    for result in results:
        assert isinstance(result, SyncError)
        assert "http://engine1: out of memory" in str(result)
        assert "bucket 1 by ipc" in str(result)
    assert read == [7, 7]


def test_an_engine_beyond_the_trainers_gpus_is_refused():
    results, _ = publish([Shared(1)], 1)
    assert "processes on the GPUs of trainer ranks 1 .. 1, but there are 1 ranks" in str(results[0])


def test_shared_memory_that_cannot_be_created_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "folder", lambda: tmp_path / "none")
    with pytest.raises(SyncError, match=rf"{tmp_path / 'none'}.*--update-weight-transport disk"):
        SharedBuffer(2048)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory, "folder", lambda: tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SyncError, match=rf"{tmp_path} cannot provide 2,048 bytes.*ENOSPC") as caught:
        SharedBuffer(2048)
    assert "No space left on device" not in str(caught.value)  # which means a full disk of checkpoints
    assert list(tmp_path.iterdir()) == []
