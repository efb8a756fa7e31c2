"""SGLang's side of a weight update: the tensors of its model, built from those of a trainer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from furlong.core.weights import WeightSource
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.transfer.device_checksum import Checksums
from furlong.weight_sync.verification import WeightVerifier, record_for

ANSWER = {
    "version": "0.5.16", "device": "cuda", "dtype": "bfloat16", "tp_size": 1, "moe_runner_backend": "auto",
    "moe_a2a_backend": "none", "ep_size": 1, "ep_num_redundant_experts": 0, "init_expert_location": "trivial",
    "kt_weight_path": None, "attn_cp_size": 1, "dcp_size": 1, "moe_dp_size": 1, "moe_dense_tp_size": None,
    "enable_prefill_cp": False, "elastic_ep_backend": None,
}  # fmt: skip
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
VOCAB = ("model.embed_tokens.weight", "lm_head.weight")


def verify(servers: Sequence[SglangServer], *updates: Any, scheme: Any = None, **source: Any) -> str:
    """Send weights to servers and verify them, once per update; return what the last verification compared.

    updates: (name, tensor) pairs. scheme: quantizes them. source: arguments of WeightSource.
    """

    async def body() -> str:
        verifier, text = WeightVerifier(), ""
        try:
            for items in updates:
                sent = record_for(servers, is_quantized=scheme is not None)
                weights = WeightSource(lambda items=items: iter(items), **source)
                for _ in sent.recording(weights if scheme is None else scheme.quantized(weights)).open():
                    pass
                text = await verifier.check(servers, sent, 7)
                assert sent.checksums
        finally:
            for server in servers:
                await server.close()
        return text

    return asyncio.run(body())


def device_checksum(tensor: Tensor) -> str:
    """Return the checksum of one tensor."""
    sums = Checksums()
    sums.add("", [tensor])
    return sums.digests()[""]


def held(state: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return the tensors of SGLang's model in this dtype, built from those of a checkpoint."""
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


def engine_checksums(state: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    """Return the checksums of these tensors."""
    return {name: device_checksum(tensor) for name, tensor in held(state, dtype).items()}


def held_by(
    rank: int,
    state: Mapping[str, Tensor],
    *,
    tp_size: int,
    attn_tp_size: int,
    head_tp_size: int,
    num_kv_heads: int,
    ep_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    """Return the tensors of one tensor-parallel process of SGLang, sliced like its weight loaders do.

    Attention is sharded over `attn_tp_size` processes, and replicated across groups of that size. A process has whole
    experts if `ep_size` equals `tp_size`, or a slice of each expert if it is 1.
    """

    def rows(tensor: Tensor, size: int) -> Tensor:
        each, rest = divmod(len(tensor), size)
        assert not rest
        return tensor[rank % size * each :][:each]

    def kv_rows(tensor: Tensor) -> Tensor:
        heads = tensor.view(num_kv_heads, -1, *tensor.shape[1:])
        if num_kv_heads < attn_tp_size:  # one head, replicated over processes
            return heads[rank % attn_tp_size * num_kv_heads // attn_tp_size]
        return rows(heads, attn_tp_size).flatten(0, 1)

    def experts(layer: str) -> dict[str, Tensor]:
        of_layer = [match for name in state if (match := EXPERT.fullmatch(name)) and match[1] == layer]
        each, rest = divmod(1 + max(int(match[2]) for match in of_layer), ep_size)
        assert not rest
        part = tp_size // ep_size
        joined: list[Tensor] = []
        down: list[Tensor] = []
        for number in range(rank // part * each, (rank // part + 1) * each):
            gate, up, last = (
                left.pop(f"{layer}.{number}.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")
            )
            joined.append(torch.cat([rows(gate, part), rows(up, part)]))
            down.append(rows(last.t(), part).t())
        return {f"{layer}.w13_weight": torch.stack(joined), f"{layer}.w2_weight": torch.stack(down)}

    found: dict[str, Tensor] = {}
    left = {name: tensor.detach().to(dtype) for name, tensor in state.items()}
    for layer in sorted({match[1] for name in left if (match := EXPERT.fullmatch(name))}):
        found |= experts(layer)
    left = {name: tensor for name, tensor in left.items() if not EXPERT.fullmatch(name)}
    for name in VOCAB:
        if name in left:
            tensor = left.pop(name)
            filled = torch.cat([tensor, tensor.new_zeros(-len(tensor) % 64, tensor.shape[1])])
            found[name] = rows(filled, attn_tp_size if "embed" in name else head_tp_size)
    for name, tensor in left.items():
        if ".q_proj." in name:
            k, v = (kv_rows(left[name.replace("q_proj", other)]) for other in ("k_proj", "v_proj"))
            found[name.replace("q_proj", "qkv_proj")] = torch.cat([rows(tensor, attn_tp_size), k, v])
        elif ".gate_proj." in name:
            up = left[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([rows(tensor, tp_size), rows(up, tp_size)])
        elif name.endswith("o_proj.weight"):
            found[name] = rows(tensor.t(), attn_tp_size).t()
        elif name.endswith("down_proj.weight"):
            found[name] = rows(tensor.t(), tp_size).t()
        elif not any(f".{part}." in name for part in ("k_proj", "v_proj", "up_proj")):
            found[name] = tensor
    return found


class Sglang(SglangServer):
    """A server that has loaded `state`; `missing` are tensors that its model stores only under another name."""

    family, label = "qwen2", "7"
    missing: Sequence[str] = ()
    num_kv_heads = 2

    def __init__(self, state: Mapping[str, Tensor], **answer: Any) -> None:
        super().__init__("http://engine", ServerInfo.read(ANSWER | answer))
        self.state, self.shown = state, list[str]()

    async def served_version(self) -> str:
        return self.label

    async def model_type(self) -> str:
        return self.family

    def ranks(self) -> list[tuple[int, dict[str, Tensor]]]:
        """Return the tensors of each process; with data-parallel attention, once per answering scheduler."""
        tp_size, dp_size = self.info.tp_size, self.info.dp_size
        if tp_size == 1:
            return [(0, held(self.state))] * dp_size
        attn_tp_size = tp_size // dp_size if self.info.has_dp_attention else tp_size
        head_tp_size = attn_tp_size if self.info.has_dp_head else tp_size
        sizes = {"tp_size": tp_size, "attn_tp_size": attn_tp_size, "head_tp_size": head_tp_size}
        sizes["ep_size"] = self.info.ep_size
        found = [held_by(r, self.state, num_kv_heads=self.num_kv_heads, **sizes) for r in range(tp_size)]
        return [*enumerate(found)] * dp_size

    async def all_checksums(self) -> tuple[list[tuple[int, dict[str, str]]], str]:
        found = [
            (rank, {name: device_checksum(tensor) for name, tensor in tensors.items() if name not in self.missing})
            for rank, tensors in self.ranks()
        ]
        return found, str(found)

    async def first_rows(self, name: str, rows: int) -> Tensor | None:
        self.shown.append(name)
        return self.state[name][:rows].to(torch.bfloat16).float()
