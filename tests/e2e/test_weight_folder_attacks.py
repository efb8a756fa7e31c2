"""Files of a weight version that change between the trainer's write and the engine's load: an error, never other
weights, and the engine keeps serving.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from furlong.errors import SyncError
from runs import flags, train
from served_engine import serve_process

SHARD, INDEX = "model-00001.safetensors", "model.safetensors.index.json"
ATTACKS = {
    "flip": "content[len(content) * 3 // 4] ^= 4; path.write_bytes(content)",
    "cut": "path.write_bytes(content[: len(content) // 2])",
    "removed": "path.unlink()",
}
HOOK = """
from pathlib import Path

def attack(args, version_dir, rollout_engines):
    path = Path(version_dir) / {file!r}
    if not {only_delta} or path.exists():
        content = bytearray(path.read_bytes())
        {attack}
"""


@pytest.fixture(scope="module")
def server(model):
    with serve_process(model) as (process, url):
        yield url
        assert process.is_alive()


def attacked(folder: Path, file: str, attack: str, url: str, model: Path, data: Path) -> str:
    """Return the error of a run whose folders are attacked; the engine answers afterwards."""
    is_delta = file.startswith("delta")
    hook = folder / f"{folder.name}_hook.py"
    hook.write_text(HOOK.format(file=file, attack=ATTACKS[attack], only_delta=is_delta))
    argv = flags(
        model, data, folder / "run", rollout_external_engine_addrs=url, update_weight_transport="disk",
        update_weight_mode="delta" if is_delta else "full", update_weight_timeout=20,
        custom_update_weight_post_write_path=f"{hook}:attack",
    )  # fmt: skip
    with pytest.raises(SyncError) as caught:
        train(argv)
    assert httpx.get(f"{url}/health", timeout=5).status_code == 200
    return str(caught.value)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_shard_is_an_error(attack, server, model, data, tmp_path):
    text = attacked(tmp_path, SHARD, attack, server, model, data)
    assert "did not answer" not in text
    assert "weights" in text if attack == "flip" else str(tmp_path / "run" / "weights") in text


def test_a_changed_index_is_an_error(server, model, data, tmp_path):
    text = attacked(tmp_path, INDEX, "cut", server, model, data)
    assert "did not answer" not in text
    assert str(tmp_path / "run" / "weights") in text


@pytest.mark.parametrize("file", ["delta.json", "delta.bin"])
def test_a_changed_delta_is_an_error(file, server, model, data, tmp_path):
    text = attacked(tmp_path, file, "flip", server, model, data)
    assert "did not answer" not in text
    assert file in text
