"""A scripted engine, and tiny random models for the embedded engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from furlong.core.weights import WeightSource, checksum
from furlong.errors import EngineError, SyncError
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.embedded.slot_batch import SlotBatch
from furlong.interfaces import Completion, Engine, PauseMode, SamplingParams
from furlong.models.tokenizer import build_tokenizer

TINY = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 192,
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {**MOE, "num_experts": 4},
    "glm4_moe": {**MOE, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "gemma2": {"sliding_window": 8},
    "olmo2": {},
}
FUSED = ("qwen2", "qwen3", "llama", "mistral")


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> tuple[Any, Any]:
    """Return a config and a random model whose outputs are far from uniform; the end-of-sequence id is 3."""
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family], **changes})
    config.eos_token_id, config.pad_token_id, config.bos_token_id = 3, None, None
    torch.manual_seed(seed)
    attention = "eager" if family in ("gpt_oss", "gemma2") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            is_scale = parameter.dim() == 1 and "norm" in name
            parameter.copy_(1 + 0.1 * noise if is_scale else 0.2 * noise)
    model.generation_config.eos_token_id = 3
    return config, model


def tiny_engine(config: Any, state: dict[str, torch.Tensor], **options: Any) -> EmbeddedEngine:
    """Return an engine for `tiny_model`, in float32 by default."""
    options = {"dtype": torch.float32, "num_slots": 8, **options}
    return EmbeddedEngine(config=config, state_dict=state, **options)


def source_of(state: dict[str, torch.Tensor]) -> WeightSource:
    """Return a weight source over a state dict."""
    return WeightSource(state.items)


def reference_log_probs(model: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return log-probs of `tokens` after `prompt`, from one full forward pass of transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].float()
    log_probs = torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1.0), -1)
    return log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def run(engine: Any, body: Callable[[], Any]) -> Any:
    """Run the coroutine of `body`, then close the engine."""

    async def main() -> Any:
        try:
            return await body()
        finally:
            await engine.close()

    return asyncio.run(main())


class Halt:
    """Makes embedded engines stop after some decode steps until `release`; they still execute commands."""

    def __init__(self, patch: pytest.MonkeyPatch, *, after_steps: int) -> None:
        step, self._left, self._is_released = SlotBatch.run, after_steps, False

        def run(batch: SlotBatch, *, admit: bool, interrupted: Callable[[], bool]) -> None:
            if self._is_released:
                step(batch, admit=admit, interrupted=interrupted)
            elif self._left:
                step(batch, admit=admit, interrupted=lambda: True)
                self._left -= 1
            else:
                time.sleep(0.001)

        patch.setattr(SlotBatch, "run", run)

    async def reached(self) -> None:
        """Wait until all steps are done."""
        while self._left:
            await asyncio.sleep(0.001)

    def release(self) -> None:
        """Let engines continue."""
        self._is_released = True


Script = Callable[[list[int], SamplingParams], list[int]]


class FakeEngine(Engine):
    """An Engine without a model: `script` returns the tokens for a prompt, generated one per loop iteration.

    The default counts up from the prompt's last token, modulo 100. `load_weights` expects the tensors in `weights`.
    """

    def __init__(
        self, script: Script | None = None, *, context_len: int = 192, weights: dict[str, torch.Size] | None = None
    ) -> None:
        self.script: Script = script or (lambda p, s: [(p[-1] + 1 + i) % 100 for i in range(s.max_new_tokens)])
        self.context_len, self.weights = context_len, weights
        self.version = 0
        self.tokenizer = build_tokenizer()
        self._going = asyncio.Event()
        self._going.set()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._running: dict[int, str | None] = {}
        self._aborted: set[int] = set()
        self._closed = False

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Return the tokens of the script."""
        if self._closed:
            raise EngineError("the fake engine is closed")
        if not prompt or len(prompt) >= self.context_len:
            raise EngineError(f"the prompt has {len(prompt)} tokens, the context length is {self.context_len}")
        if params.temperature < 0 or params.max_new_tokens < 0:
            raise EngineError(f"temperature is {params.temperature}, max_new_tokens is {params.max_new_tokens}")
        limit = min(params.max_new_tokens, self.context_len - len(prompt))
        tokens: list[int] = []
        versions: list[int] = []
        reason = "length"
        key = id(tokens)
        self._running[key] = session
        try:
            await self._admitting.wait()
            for token in self.script(prompt, params)[:limit]:
                await asyncio.sleep(0)
                await self._going.wait()
                if self._closed:
                    raise EngineError("the fake engine was closed")
                if key in self._aborted:
                    reason = "abort"
                    break
                tokens.append(token)
                versions.append(self.version)
                if token in params.stop_token_ids:
                    reason = "stop"
                    break
        finally:
            self._running.pop(key)
            self._aborted.discard(key)
        text = self.tokenizer.decode(tokens)
        return Completion(tokens, [-1.0] * len(tokens), versions, reason, text)  # pyright: ignore[reportArgumentType]

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine`."""
        self._admitting.clear()
        if mode == "abort":
            self._aborted.update(self._running)
            self._going.set()
            self._admitting.set()
        if mode in ("abort", "finish"):
            while self._running:
                await asyncio.sleep(0)
            self._admitting.clear()
        self._going.clear()

    async def resume(self) -> None:
        """See `Engine`."""
        self._going.set()
        self._admitting.set()

    async def abort(self, sessions: Collection[str]) -> None:
        """See `Engine`."""
        self._aborted.update(key for key, session in self._running.items() if session in sessions)

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        """Check names and shapes."""
        got = dict(source.open())
        if self.weights is not None:
            wrong = sorted(set(got) ^ set(self.weights)) + [
                n for n, t in got.items() if n in self.weights and t.shape != self.weights[n]
            ]
            if wrong:
                raise SyncError(f"names or shapes differ: {wrong}")
        self.version = version
        return {name: checksum(tensor) for name, tensor in got.items()}

    async def close(self) -> None:
        """Fail running requests."""
        self._closed = True
        self._going.set()
        self._admitting.set()
        while self._running:
            with contextlib.suppress(EngineError):
                await asyncio.sleep(0)
