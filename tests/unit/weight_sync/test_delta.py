"""The codec of deltas, damaged ones, and who gets a whole folder."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from furlong.errors import EngineTimeoutError, SyncError
from furlong.files import delta as codec
from furlong.files.delta import Delta, DeltaWriter
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports.disk import DeltaTransport
from served_engine import ScriptedServer, Untrained
from transport_context import transport_context


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 50),
    width=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 9),
    encoding=st.sampled_from(["xor", "overwrite"]),
    frac=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_decoding_restores_any_bytes(size, width, seed, encoding, frac):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size * width, dtype=np.uint8)
    new = np.where(rng.random(len(old)) < frac, rng.integers(0, 256, len(old), dtype=np.uint8), old)
    data = codec.encoded(new, old, width, encoding)
    assert (codec.decoded(data, old, width, encoding) == new).all()
    assert (data == b"") == bool((new == old).all())


def state_of(seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (64, 33), "b": (5,), "c": (0, 3), "d": (16, 16)}
    return {name: (0.02 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


def stepped(state):
    """A step that changes few low bits of `a` and nothing of `d`."""
    moved = {name: tensor.clone() for name, tensor in state.items()}
    moved["a"] = (state["a"].float() - 1e-6 * torch.sign(torch.randn(64, 33))).to(torch.bfloat16)
    moved["b"] = -state["b"]
    return moved


def written(folder, base, new, encoding="xor"):
    folder.mkdir()
    copies = {name: tensor.clone() for name, tensor in base.items()}
    writer = DeltaWriter(folder, copies, encoding=encoding, checksum="xxh3-128")
    writer.write(new.items(), version=8, base_version=7)
    assert all(torch.equal(copies[name], new[name]) for name in new)
    return writer.num_bytes


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_delta_applied_to_its_base_is_the_new_version(tmp_path, encoding):
    base = state_of(0)
    new = stepped(base)
    size = written(tmp_path / "d", base, new, encoding)
    delta = Delta.open(tmp_path / "d")
    result = dict(delta.source(base.__getitem__).open())
    assert list(result) == list(new)
    assert all(torch.equal(result[name], new[name]) for name in new)
    assert delta.tensors["d"].size == 0
    assert size < sum(tensor.nbytes for tensor in new.values())


def test_another_base_a_corrupt_file_and_another_dtype_are_refused(tmp_path):
    base = state_of(0)
    written(tmp_path / "d", base, stepped(base))
    delta = Delta.open(tmp_path / "d")
    with pytest.raises(SyncError, match=r"to version 8.* version 7"):
        list(delta.source(state_of(1).__getitem__).open())
    with pytest.raises(SyncError, match=r"a is torch\.float32 .* the delta has bfloat16"):
        list(delta.source({n: t.float() for n, t in base.items()}.__getitem__).open())
    path = tmp_path / "d" / "delta.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + bytes([whole[20] ^ 255]) + whole[21:])
    with pytest.raises(SyncError, match="corrupt"):
        list(delta.source(base.__getitem__).open())
    path.write_bytes(whole[:-1])
    with pytest.raises(SyncError, match=r"delta\.bin ends within"):
        list(delta.source(base.__getitem__).open())
    (tmp_path / "d" / "delta.json").write_text("{}")
    with pytest.raises(SyncError, match=r"delta\.json"):
        Delta.open(tmp_path / "d")


def test_sglang_loads_a_whole_folder_after_a_delta(tmp_path):
    seen = []
    version = "1"

    async def answer(path, body):
        nonlocal version
        if path == "/update_weights_from_disk":
            files = {}
            folder = tmp_path / body["model_path"]
            for file in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values():
                files |= load_file(folder / file)
            seen.append((folder.name, body.get("load_format"), files))
            version = body["weight_version"]
        if path == "/model_info":
            return 200, {"weight_version": version}
        return (400, {"message": "cannot"}) if path != "/update_weights_from_disk" else (200, {"success": True})

    server = ScriptedServer(answer)
    client = SglangServer(server.url, ServerInfo.read({"version": "0.5.16"}))
    (tmp_path / "config.json").write_text("{}")
    transport = DeltaTransport(transport_context(2000, folder=tmp_path / "w"))
    trainer = Untrained(state_of(0))

    async def body():
        async def servers():
            return [client]

        sync = LocalSync(trainer, servers, transport)
        await sync.update_weights(1)
        trainer.state = stepped(trainer.state)
        await sync.update_weights(2)
        await sync.close()
        await client.close()

    try:
        asyncio.run(body())
    finally:
        server.stop()
    assert [name for name, _, _ in seen] == ["version_000001", "version_000002"]
    assert {load_format for _, load_format, _ in seen} == {None}
    assert all(torch.equal(seen[1][2][name], tensor) for name, tensor in trainer.state.items())


def test_a_server_that_does_not_say_in_time_which_weights_it_has_is_the_one_that_is_silent(tmp_path):
    class Hanging:
        url, checksum_dtype = "http://silent", torch.bfloat16

        async def served_version(self):
            raise EngineTimeoutError("no answer within 120 s", url=self.url)

    transport = DeltaTransport(transport_context(2000, folder=tmp_path / "w"))
    with pytest.raises(EngineTimeoutError) as caught:
        asyncio.run(transport._split([Hanging()], 1))
    assert caught.value.url == "http://silent"


DAMAGES = {
    "empty": lambda path, _: path.write_bytes(b""),
    "half": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "noise": lambda path, content: path.write_bytes(bytes(reversed(content))),
    "list": lambda path, _: path.write_text("[1]"),
    "folder": lambda path, _: (path.unlink(), path.mkdir()),
    "missing": lambda path, _: path.unlink(),
}


@pytest.mark.parametrize("file", ["delta.json", "delta.bin"])
def test_a_damaged_delta_is_refused_with_the_file(tmp_path, file):
    base = state_of(0)
    for kind, damage in DAMAGES.items():
        written(tmp_path / kind, base, stepped(base))
        damage(tmp_path / kind / file, (tmp_path / kind / file).read_bytes())
        with pytest.raises(SyncError, match=rf"{kind}/{file}.*--load"):
            dict(Delta.open(tmp_path / kind).source(base.__getitem__).open())


@pytest.mark.parametrize(
    ("file", "encoding"), [("delta.json", "xor"), ("delta.bin", "xor"), ("delta.bin", "overwrite")]
)
def test_a_changed_byte_of_a_delta_is_an_error_or_changes_nothing(tmp_path, file, encoding):
    base = state_of(0)
    new = stepped(base)
    written(tmp_path / "d", base, new, encoding)

    def stored(name):
        if name not in base:
            raise SyncError("as an engine that has no such tensor")
        return base[name]

    content = (tmp_path / "d" / file).read_bytes()
    for place in [*range(40), *range(40, len(content), max(1, len(content) // 60))]:
        for changed in (content[place] ^ (1 << (place % 8)), content[place] ^ 255):
            (tmp_path / "d" / file).write_bytes(content[:place] + bytes([changed]) + content[place + 1 :])
            try:
                result = dict(Delta.open(tmp_path / "d").source(stored).open())
            except SyncError:
                continue
            assert all(torch.equal(result[name], new[name]) for name in result)


def test_a_delta_that_claims_more_bytes_than_its_tensor_has_is_not_unpacked(tmp_path):
    base = state_of(0)
    written(tmp_path / "d", base, stepped(base))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    manifest = json.loads((tmp_path / "d" / "delta.json").read_text())
    manifest["tensors"]["a"] |= {"offset": 0, "size": len(bomb)}
    (tmp_path / "d" / "delta.json").write_text(json.dumps(manifest))
    (tmp_path / "d" / "delta.bin").write_bytes(bomb)
    with pytest.raises(SyncError, match=r"delta of a in .*delta\.bin is corrupt.*16777216 bytes"):
        dict(Delta.open(tmp_path / "d").source(base.__getitem__).open())
    for name, value in (("encoding", "gzip"), ("checksum", "crc"), ("format", "2")):
        (tmp_path / "d" / "delta.json").write_text(json.dumps(manifest | {name: value}))
        with pytest.raises(SyncError, match=rf"delta\.json .* its {name} is '{value}'"):
            Delta.open(tmp_path / "d")
