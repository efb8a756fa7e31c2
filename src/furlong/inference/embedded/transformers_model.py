"""Any causal language model of transformers as a `DecodeModel`: its own forward pass over the slot KV cache.

Attention is replaced by a function registered with transformers that reads the slot cache of the current call. Sliding
windows, attention sinks, logit soft-capping and value heads of another width are supported. Gated delta nets
(Qwen3-Next, Qwen3.5) have their convolution and recurrent states in the slots. Other recurrent layers are rejected.

A mixture of experts multiplies only the rows routed to an expert, so its results depend on the batch at rounding level;
those of `FusedDenseModel` do not.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from furlong.core.routing import Routes, RoutingShape
from furlong.errors import EngineError
from furlong.inference.embedded.decode_model import bucketed_length, padded_rows
from furlong.inference.embedded.decode_steps import SlotCache, attend_slots, decode_mask
from furlong.inference.embedded.prompt_attention import PromptMask, attend_explicitly, attend_prompt
from furlong.inference.embedded.weight_table import WeightTable
from furlong.models.hf_model import Rows, disk_rows
from furlong.models.model_facts import (
    ATTENTION_LAYERS,
    DELTA_LAYERS,
    has_only_delta_nets,
    hidden_window,
    layer_kinds,
    recurrent_kinds,
    takes_positions,
)
from furlong.models.router_hooks import RouterHooks, RouterRecord

ATTENTION_NAME = "furlong_slots"
IGNORED_ARGUMENTS = {
    "dropout",
    "position_ids",
    "use_cache",
    "is_causal",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}
# Length of the trial before a model is used, and the relative difference of logits allowed in it.
TRIAL_LEN = 12
WIDE_GAP, HALF_GAP = 0.01, 0.2  # measured: 0.015 in bfloat16, at least 0.24 with wrong positions


@dataclass
class _ModelCall:
    """One forward pass: prefill of the tokens from `start` to `length` of `slot`, or decode at `positions_N`.

    A decode step reads `length` positions.
    """

    cache: SlotCache
    slot: int = 0
    start: int = 0
    positions_N: Tensor | None = None
    length: int = 0
    masks: dict[int | None, PromptMask] = field(default_factory=dict[int | None, PromptMask])  # by window
    attended_layers: int = 0


_current = threading.local()


class _CacheAdapter:
    """The cache that transformers' layers call. attention_layers: their numbers in the model."""

    is_compileable = False
    is_sliding: Sequence[bool] = ()

    def __init__(self, attention_layers: Sequence[int]) -> None:
        self._places = {layer: place for place, layer in enumerate(attention_layers)}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        call: _ModelCall = _current.call
        keys, values = call.cache.layer(self._places[layer_idx], key_states, value_states)
        if call.positions_N is None:
            new, places = slice(call.length - call.start), slice(call.start, call.length)
            keys[call.slot, :, places] = key_states[0, :, new]
            values[call.slot, :, places] = value_states[0, :, new]
            return keys[call.slot][None], values[call.slot][None]
        where = call.cache.places(call.positions_N, keys.shape[1])
        for cached, new in ((keys, key_states), (values, value_states)):
            cached.view(-1, cached.shape[-1]).index_copy_(0, where, new.reshape(-1, new.shape[-1]))
        n = key_states.shape[0]
        return keys[:n, :, : call.length], values[:n, :, : call.length]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def has_previous_state(self, layer_idx: int | None = None, **_: Any) -> bool:
        """Return whether a recurrent layer continues; masks, which ask without a layer, are the caller's."""
        return layer_idx is not None and self.get_recurrent_state(layer_idx) is not None

    @property
    def layers(self) -> _LayerStates:
        return _LayerStates(self)

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        del state_idx  # a gated delta net has one
        return self._state(f"conv {layer_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        del state_idx
        return self._state(f"recurrent {layer_idx}")

    def _state(self, name: str) -> Tensor | None:
        """The state of the current slots, which the layer may change; None for a prompt, which starts without one."""
        call: _ModelCall = _current.call
        return None if call.positions_N is None else call.cache.states[name][: len(call.positions_N)]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Store the last inputs of the convolution, which old versions of transformers pad; called for prompts only."""
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        last = functional.pad(conv_states, (width - conv_states.shape[-1], 0))
        self._store(f"conv {layer_idx}", last)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        self._store(f"recurrent {layer_idx}", recurrent_states)
        return recurrent_states

    def _store(self, name: str, rows: Tensor) -> None:
        call: _ModelCall = _current.call
        state = call.cache.state(name, rows)
        if call.positions_N is None:
            state[call.slot : call.slot + 1] = rows
        else:
            state[: len(rows)] = rows


@dataclass
class _LayerStates:
    """The states of a decode step by layer, where transformers before 5.21 reads them; since 5.14, by number."""

    adapter: _CacheAdapter

    def __getitem__(self, layer_idx: int) -> SimpleNamespace:
        adapter = self.adapter
        conv, recurrent = adapter.get_conv_state(layer_idx), adapter.get_recurrent_state(layer_idx)
        if hasattr(LinearAttentionLayer, "activate_past_recording"):
            return SimpleNamespace(conv_states=[conv], recurrent_states=[recurrent], record_past=False)
        return SimpleNamespace(conv_states=conv, recurrent_states=recurrent)


def _slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of [B, H, T, D] queries; returns [B, T, H, Dv].

    During decode T is 1 and keys are the slots' [N, K, L, D]; during prefill keys are those of the prompt's slot.
    """
    call: _ModelCall = _current.call
    call.attended_layers += 1
    if unknown := sorted(name for name, value in rest.items() if value is not None and name not in IGNORED_ARGUMENTS):
        raise EngineError(
            f"{type(module).__name__}: attention arguments {unknown} are not supported by the embedded engine; use "
            "SGLang"
        )
    if attention_mask is not None:  # transformers builds none for unknown attention functions
        raise EngineError(
            f"{type(module).__name__} builds its own attention mask, which the embedded engine does not support; "
            "use SGLang"
        )
    B, H, T, D = query.shape
    K = key.shape[1]
    scale = D**-0.5 if scaling is None else scaling
    if call.positions_N is not None:
        mask = decode_mask(call.positions_N, call.length, query.dtype, K, sliding_window)
        q = query.reshape(B * K, H // K, D)
        if s_aux is None and softcap is None:
            out = attend_slots(q, key, value, mask, scale)
        else:
            sinks = None if s_aux is None else s_aux.view(K, H // K, 1).repeat(B, 1, 1)
            out = attend_explicitly(q, key.flatten(0, 1), value.flatten(0, 1), mask, scale, sinks, softcap)
        return out.reshape(B, 1, H, value.shape[-1]), None
    count = call.length - call.start  # the others are padding
    if sliding_window not in call.masks:
        call.masks[sliding_window] = PromptMask(sliding_window)
    mask = call.masks[sliding_window]
    out = query.new_zeros(B, T, H, value.shape[-1])
    attended = attend_prompt(query[:, :, :count], key, value, call.start, mask, scale, sinks=s_aux, softcap=softcap)
    out[:, :count] = attended.transpose(1, 2)
    return out, None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _slot_attention)


class TransformersModel:
    """A transformers causal model that decodes over a `SlotCache`. `model` is moved to `dtype` and `device`."""

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device) -> None:
        config: Any = model.config
        if not hasattr(config, "vocab_size"):
            raise EngineError(
                f"model type {config.model_type} is not a text-only model (its config.json has no vocab_size), which "
                "the embedded engine does not support: use SGLang for this model"
            )
        is_recurrent = bool(recurrent_kinds(config)) and has_only_delta_nets(model)
        known = ATTENTION_LAYERS | {DELTA_LAYERS} if is_recurrent else ATTENTION_LAYERS
        if others := sorted(layer_kinds(config) - known):
            raise EngineError(
                f"model type {config.model_type} has layers of kind {others}; the embedded engine caches keys and "
                "values of all tokens or a window only: use SGLang for this model"
            )
        if reason := hidden_window(config):
            raise EngineError(f"model type {config.model_type} {reason}; use SGLang for this model")
        if not takes_positions(model):
            raise EngineError(
                f"model type {config.model_type} computes positions itself, which is wrong when it receives one "
                "token at a time; use another model family, or use SGLang if it supports this one"
            )
        self.model: Any = model
        self.model.to(device=device).eval().requires_grad_(requires_grad=False)
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.dtype, self.device, self.vocab_size = dtype, device, config.vocab_size
        kinds: Sequence[str] = config.layer_types if is_recurrent else ("",) * config.num_hidden_layers
        self._attention_layers = [layer for layer, kind in enumerate(kinds) if kind != DELTA_LAYERS]
        self._is_recurrent = is_recurrent
        self.extends_prefixes = not is_recurrent
        self.captures_steps = False
        self._masks: dict[int | None, PromptMask] = {}
        self.description = f"transformers path for {config.model_type}"
        self.table = weight_table(model)
        self._cache_argument = {cache_parameter(model): _CacheAdapter(self._attention_layers)}
        self._router_hooks = RouterHooks(model)
        self.routing = RoutingShape.of(config.to_dict()) if self._router_hooks else None
        self.records_routes = False
        self.routes: list[Routes] = []

    @torch.inference_mode()
    def check(self) -> None:
        """Compare a prompt and a few decode steps with the model's own forward pass over the same tokens.

        Raises EngineError for a family that differs (other position offsets, bidirectional attention), and for one
        that needs more of a cache than slots provide.
        """
        num_tokens = min(TRIAL_LEN, getattr(self.model.config, "max_position_embeddings", TRIAL_LEN))
        ids_T = (7 * torch.arange(num_tokens, device=self.device) + 11) % self.vocab_size
        self.model.set_attn_implementation("eager")  # supported by every family
        reference_TV = self.model(input_ids=ids_T[None], use_cache=False).logits[0].float()
        self.model.set_attn_implementation(ATTENTION_NAME)
        if not reference_TV.isfinite().all():
            return  # non-finite weights say nothing about the family
        try:
            actual = self._trial(ids_T)
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            raise EngineError(
                f"{self.description}: it does not work with the embedded engine ({type(error).__name__}: {error}); "
                "use SGLang for this model"
            ) from error
        expected = reference_TV[num_tokens - len(actual) :]
        spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
        gap = float(((actual - expected).norm(dim=-1) / spread).median())
        if gap > (HALF_GAP if self.dtype.itemsize < 4 else WIDE_GAP):
            raise EngineError(
                f"{self.description}: logits of the embedded engine differ from the model's own forward pass by "
                f"{gap:.2g} (relative); positions or attention of this family are not supported. Use SGLang for this "
                "model"
            )

    def _trial(self, ids_T: Tensor) -> Tensor:
        """Logits after the first half of `ids_T` as a prompt, and after each further token as a decode step."""
        slots, half = padded_rows(1), len(ids_T) // 2
        cache = SlotCache()
        cache.resize(slots, bucketed_length(len(ids_T)))
        rows = [self.prefill([ids_T[:half].tolist()], cache, [0], [0])]
        for place in range(half, len(ids_T)):
            tokens_N, positions_N = ids_T.new_zeros(slots), np.zeros(slots, np.int64)
            tokens_N[0], positions_N[0] = ids_T[place], place
            rows.append(self.decode(tokens_N, positions_N, cache, len(ids_T))[:1])
        return torch.cat(rows)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: SlotCache,
        slots: Sequence[int],
        starts: Sequence[int],
        *,
        last: int = 1,
    ) -> Tensor:
        """Run the prompts one by one; short ones are padded on the right."""
        rows: list[Tensor] = []
        self.routes = []
        for prompt, slot, start in zip(prompts, slots, starts, strict=True):
            count = len(prompt) - start
            padding = 0 if self._is_recurrent else padded_rows(count) - count  # would change the state
            tokens = [*prompt[start:], *[0] * padding]
            call = _ModelCall(cache, slot=slot, start=start, length=len(prompt), masks=self._masks)
            ids = torch.tensor([tokens], device=self.device)
            positions = torch.arange(start, start + len(tokens), device=self.device).clamp_(max=len(prompt) - 1)[None]
            kept = torch.arange(count - last, count - last + padded_rows(last), device=self.device)
            rows.append(self._logits(call, ids, positions, kept.clamp_(max=count - 1))[0, :last])
            if self.records_routes:
                self.routes[-1] = self.routes[-1][:count]
        return torch.cat(rows)

    def decode(self, tokens_N: Tensor, positions_N: NDArray[np.int64], cache: SlotCache, length: int) -> Tensor:
        """Process one token per slot."""
        self.routes = []
        positions = torch.from_numpy(positions_N).to(self.device)
        call = _ModelCall(cache, positions_N=positions, length=length)
        return self._logits(call, tokens_N[:, None], positions[:, None], 0)[:, 0]

    def _logits(self, call: _ModelCall, ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        """Float32 logits at the positions `keep` of each row (0: all)."""
        _current.call = call
        self._router_hooks.current = RouterRecord() if self.records_routes and self.routing is not None else None
        try:
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=keep,
                **self._cache_argument,
            )
        finally:
            del _current.call
        if call.attended_layers != len(self._attention_layers):
            raise EngineError(
                f"{self.description}: {call.attended_layers} of {len(self._attention_layers)} layers used the slot "
                "cache; "
                "the attention of this model cannot be replaced, use SGLang"
            )
        if self._router_hooks.current is not None:
            self.routes.append(self._routes_of(self._router_hooks.current))
        return out.logits.float()

    def _routes_of(self, record: RouterRecord) -> Routes:
        """The routed experts in the format of `core.routing`; 0 in layers without experts, like SGLang."""
        assert self.routing is not None
        experts_lTK = record.own_lTK().cpu().numpy()
        routes = np.zeros((experts_lTK.shape[1], self.routing.num_layers, self.routing.top_k), np.int16)
        routes[:, self._router_hooks.layers] = experts_lTK.swapaxes(0, 1)
        return routes


def cache_parameter(model: PreTrainedModel) -> str:
    """Return the name of the cache among the arguments of `model`: transformers 5.24 renamed it to `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def weight_table(model: PreTrainedModel) -> WeightTable:
    """Register every tensor under its checkpoint name, with tied names and the pieces of fused tensors."""
    table = WeightTable()
    by_storage: dict[int, str] = {}
    for module_name, parameter in model.state_dict(keep_vars=True).items():
        tensor = parameter.data
        form = disk_rows(model, module_name, tensor)
        name = module_name if form.axis >= 0 else form.pieces[0][0]
        table.views[name] = tensor
        if tensor.data_ptr() in by_storage and tensor.numel():
            table.tied.add(name)
        by_storage.setdefault(tensor.data_ptr(), name)
        if form.axis >= 0:
            pieces = _pieces(form, tensor)
            table.views |= pieces
            table.parts[name] = list(pieces)
    return table


def _pieces(form: Rows, tensor: Tensor) -> dict[str, Tensor]:
    rows = ((names, row.chunk(len(names), dim=form.axis)) for names, row in zip(form.pieces, tensor, strict=True))
    return {name: part for names, parts in rows for name, part in zip(names, parts, strict=True)}
