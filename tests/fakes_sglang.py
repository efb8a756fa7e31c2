"""SGLang's side of a publication: its model's tensors made of a trainer's by joining them whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from furlong.core.device_checksum import device_checksum
from furlong.engines.server_info import ServerInfo
from furlong.engines.sglang_server import SglangServer

ANSWER = {
    "version": "0.5.16", "device": "cuda", "dtype": "bfloat16", "tp_size": 1, "moe_runner_backend": "auto",
    "moe_a2a_backend": "none", "ep_size": 1, "ep_num_redundant_experts": 0, "init_expert_location": "trivial",
    "kt_weight_path": None,
}  # fmt: skip
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
VOCAB = ("model.embed_tokens.weight", "lm_head.weight")


def held(state: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors of SGLang's model in this precision, of those of a checkpoint."""
    left = {name: tensor.detach().to(dtype) for name, tensor in state.items()}
    found: dict[str, Tensor] = {}
    experts = [match for name in left if (match := EXPERT.fullmatch(name))]
    for layer in sorted({match[1] for match in experts}):
        of_layer = range(1 + max(int(match[2]) for match in experts if match[1] == layer))
        for whole, parts in (("w13_weight", ("gate_proj", "up_proj")), ("w2_weight", ("down_proj",))):
            rows = [torch.cat([left.pop(f"{layer}.{e}.{part}.weight") for part in parts]) for e in of_layer]
            found[f"{layer}.{whole}"] = torch.stack(rows)
    for whole, parts in JOINED.items():
        for first in [name for name in left if parts[0] in name]:
            pieces = [left.pop(first.replace(parts[0], part)) for part in parts]
            found[first.replace(parts[0], whole)] = torch.cat(pieces)
    for name in VOCAB:
        if name in left:
            left[name] = torch.cat([left[name], left[name].new_zeros(-len(left[name]) % 64, left[name].shape[1])])
    return found | left


def held_checksums(state: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    """Their checksums, each of the whole tensor."""
    return {name: device_checksum(tensor) for name, tensor in held(state, dtype).items()}


class Sglang(SglangServer):
    """A server that has loaded `state`; `missing` are tensors of its model that are others' under another name."""

    family, label = "qwen2", "7"
    missing: Sequence[str] = ()

    def __init__(self, state: Mapping[str, Tensor], **answer: Any) -> None:
        super().__init__("http://engine", ServerInfo.read(ANSWER | answer))
        self.state, self.shown = state, list[str]()

    async def served_version(self) -> str:
        return self.label

    async def model_type(self) -> str:
        return self.family

    async def checksums(self) -> tuple[dict[str, str], str]:
        found = {name: each for name, each in held_checksums(self.state).items() if name not in self.missing}
        return found, str(sorted(found.items()))

    async def first_rows(self, name: str, rows: int) -> Tensor | None:
        self.shown.append(name)
        return self.state[name][:rows].to(torch.bfloat16).float()
