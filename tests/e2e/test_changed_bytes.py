"""A damaged file of a checkpoint, or one that a run stands on, is refused with its name."""

from __future__ import annotations

import random
import re

import pytest

from changed_bytes import DAMAGE, SavedRun
from furlong.errors import FurlongError


def test_a_damaged_file_is_refused_by_name(tmp_path):
    saved, draw = SavedRun(tmp_path), random.Random(1)
    readers = saved.readers()
    before = {read: read() for read in set(readers.values())}
    for path, read in readers.items():
        named = str(path.parent) if path.name == "model.safetensors" else path.name
        content = path.read_bytes()
        for kind, damage in DAMAGE.items():
            if kind == "deleted" and path.name in ("inputs.json", "ledger.jsonl"):
                continue  # the former may be absent, the latter is begun anew
            damage(path, draw)
            try:
                if kind in ("a byte", "noise") and path.name in ("manifest.json", "1.safetensors"):
                    continue  # a manifest, which lists the others, and dumps have no checksum
                with pytest.raises(FurlongError, match=re.escape(named)):
                    pytest.fail(f"{kind} of {path}: {read()}")
            finally:
                path.write_bytes(content)
    assert {read: read() for read in before} == before
    saved.close()
