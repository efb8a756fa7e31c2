"""A fake SGLang server that loads weight folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fakes_sglang import ANSWER, Sglang
from served_engine import ScriptedServer, reply


class Loading(ScriptedServer):
    """Reports a model family and the checksums of the last loaded folder; answers all prompts with the same tokens.

    `moved` maps tensors to the tensor that is loaded instead.
    """

    def __init__(self, family: str, *, num_kv_heads: int = 2, **options: Any) -> None:
        self.moved: dict[str, str] = {}
        self._family, self._num_kv_heads, self._answer = family, num_kv_heads, ANSWER | options
        self._folder, self._label = Path(), "0"
        super().__init__(self._reply)

    async def _reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/update_weights_from_disk":
            self._folder, self._label = Path(body["model_path"]), body["weight_version"]
        if path == "/weights_checker":
            return 200, {"success": True, "ranks": await self._checksums()}
        if path == "/generate":
            length = min(3, body["sampling_params"]["max_new_tokens"])
            return 200, reply([5, 6, 7][:length], version=self._label)
        model = {"weight_version": self._label, "model_type": self._family}
        return 200, {"/model_info": model, "/server_info": self._answer}.get(path, {"success": True})

    async def _checksums(self) -> list[dict[str, Any]]:
        files = json.loads((self._folder / "model.safetensors.index.json").read_text())["weight_map"]
        state = {name: load_file(self._folder / file)[name] for name, file in files.items()}
        held = Sglang(state | {name: state[other] for name, other in self.moved.items()}, **self._answer)
        held.num_kv_heads = self._num_kv_heads
        found, _ = await held.all_checksums()
        await held.close()
        return [
            {"checksums": sums, "per_gpu_checksum": str(sums), "parallelism_info": {"tp_rank": rank}}
            for rank, sums in found
        ]
