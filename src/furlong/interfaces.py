"""The interfaces between the parts of a run: what the loop, the rollouts and the trainers know about each other.

`wiring/` chooses the implementations; nothing else names them. `Engine`, `Trainer`, `WeightSync` and `DeviceSharing`
are classes: implementations subclass them, must define the abstract methods, and override the others where they can do
more. The smaller interfaces are protocols. The interface of a training backend is `training.backend_interface.Backend`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.algorithms import Role
from furlong.core.batch import MicroBatch, RolloutBatch
from furlong.core.device_memory import DeviceMemory, MemoryTransfer
from furlong.core.metric import Metrics
from furlong.core.outcome import Outcome
from furlong.core.routing import Routes
from furlong.core.sample import Group, Sample
from furlong.core.token_stream import TokenStream
from furlong.core.weights import SyncReport, WeightSource
from furlong.errors import EngineError, FurlongError, TrainerError
from furlong.files.atomic import PendingFiles

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["finish", "hold", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one completion, under SGLang's names.

    `temperature` 0 is greedy; `top_k` -1 and `min_p` 0 are off. With a `sampling_seed`, the completion depends only on
    the prompt, the weights and the seed, not on the other requests in the batch. `return_routed_experts` adds the
    experts of each token to the result and does not change the completion. `json_schema` is the text of a schema that
    the completion follows. An engine may keep the KV cache of the
    prompt under `prefix_key`, for the next prompt with that key, which has its beginning.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = True
    sampling_seed: int | None = None
    return_routed_experts: bool = False
    json_schema: str | None = None
    prefix_key: str | None = None

    def for_request(self, max_new_tokens: int, sampling_seed: int | None) -> SamplingParams:
        """Return a copy with these values. `dataclasses.replace` takes ten times as long, for every request."""
        params = object.__new__(SamplingParams)
        vars(params).update(vars(self), max_new_tokens=max_new_tokens, sampling_seed=sampling_seed)
        return params


@dataclass(frozen=True)
class TokenScores:
    """Log-probs of the last R tokens of a sequence, by a model that reads it. Axes: K tokens per position.

    log_probs_R: float32, of the tokens themselves. top_ids_RK, top_log_probs_RK: int32 and float32, of the most likely
    tokens at their positions, the most likely first. asked_RK: float32, of the ids that were asked for.
    """

    log_probs_R: NDArray[np.float32]
    top_ids_RK: NDArray[np.int32]
    top_log_probs_RK: NDArray[np.float32]
    asked_RK: NDArray[np.float32]


@dataclass(frozen=True)
class Completion:
    """One generated response.

    log_probs: log_softmax(logits / temperature) of each token, before top-p, top-k and min-p (as in SGLang), before
        tokens are banned for `json_schema`, and in the embedded engine for `min_new_tokens`.
    versions: the weight version that each token was sampled from.
    cached_tokens: prompt tokens that were not computed, because the engine had their KV cache.
    finish_reason: "abort" if the request was ended early; `tokens` are those generated until then.
    routed_experts: [prompt + tokens - 1, layers, experts per token] if requested; None if the request was aborted
        before its prompt was processed.
    """

    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    text: str = ""
    cached_tokens: int = 0
    latency_s: float = 0.0
    routed_experts: Routes | None = field(default=None, compare=False)
    scores: TokenScores | None = field(default=None, compare=False)  # only within an engine, for `Engine.score`


class Engine(ABC):
    """Generates completions, in this process (`inference.embedded`) or on servers (`inference.sglang`)."""

    @abstractmethod
    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Complete `prompt` (token ids). Raises EngineError if the prompt does not fit into the context."""

    async def stream(
        self, prompt: list[int], params: SamplingParams, tokens: TokenStream, *, session: str | None = None
    ) -> Completion:
        """`generate`, and put the tokens into `tokens` as they are sampled; by default, at the end."""
        completion = await self.generate(prompt, params, session=session)
        tokens.put(0, completion.tokens, completion.log_probs)
        return completion

    async def score(
        self,
        tokens: Sequence[int],
        num_scored: int,
        *,
        temperature: float = 1.0,
        num_top: int = 0,
        ids_RK: NDArray[np.int32] | None = None,
    ) -> TokenScores:
        """Return log-probs of the last `num_scored` tokens, after at least one other, without generating.

        num_top: number of most likely tokens to return for each position. ids_RK: further tokens of each position.
        Log-probs are of log_softmax(logits / temperature), for which 0 is like 1. Raises EngineError for tokens that do
        not fit into the context, and by default.
        """
        del tokens, num_scored, temperature, num_top, ids_RK
        raise EngineError(f"{type(self).__name__} does not return log-probs of given tokens; use another engine")

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: "finish" waits for running requests, "hold" suspends them, "abort" ends them."""

    @abstractmethod
    async def resume(self) -> None:
        """Generate again after `pause`. Suspended requests continue with the weights loaded meanwhile."""

    @abstractmethod
    async def abort(self, sessions: Collection[str]) -> None:
        """End all running and waiting requests of these sessions; each returns the tokens it has so far."""

    @abstractmethod
    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        """Replace all weights; return the checksum of each loaded tensor by Hugging Face name.

        Raises SyncError for an unknown name, a wrong shape or a missing tensor.
        """

    async def wait_until_weights_needed(self) -> None:
        """Return once every server was lost and the replacements need a weight update; by default, never."""
        await asyncio.Event().wait()

    @property
    def caches_prefixes(self) -> bool:
        """Whether the next prompt with a `prefix_key` is computed from where it differs from the last; False here."""
        return False

    @property
    def scored_temperatures(self) -> tuple[float, ...] | None:
        """Temperatures at which `score`, and completions within a `json_schema`, have exact log-probs; None for all."""
        return None

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that generate, or of processes on CPUs."""
        return 1

    def queue_lengths(self) -> dict[str, int]:
        """Return numbers of running and waiting requests, for reports about a hanging run; {} by default."""
        return {}

    def take_load(self) -> Metrics:
        """Return metrics of the load on the engines since the last call; {} by default."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Release all resources; running requests fail with EngineError."""


class Trainer(ABC):
    """Training as the driver sees it: in this process, or on a group of ranks."""

    @abstractmethod
    async def train(self, batch: RolloutBatch) -> Metrics:
        """Run all optimizer steps of one rollout."""

    @abstractmethod
    def weights(self) -> WeightSource:
        """Return the policy's current weights under Hugging Face names."""

    @abstractmethod
    async def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and RNG state into the existing `folder`."""

    @abstractmethod
    async def snapshot(self, folder: Path) -> PendingFiles:
        """Copy what `save` writes to host memory; any thread may write the returned files while training continues."""

    @abstractmethod
    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""

    @abstractmethod
    async def save_hf(self, folder: Path, *, model: Role = "actor") -> None:
        """Write a folder that transformers can load."""

    async def offload(self) -> MemoryTransfer:
        """Move parameters and optimizer states to host memory and free the device. Raises TrainerError by default."""
        raise TrainerError(f"{type(self).__name__} cannot offload its state to the host; add --no-offload-train")

    async def onload(self) -> MemoryTransfer:
        """Undo `offload`."""
        return MemoryTransfer(0, 0.0)

    async def empty_cache(self) -> None:  # noqa: B027  optional: a no-op by default
        """Free device memory that is cached but not used by any tensor."""

    async def device_memory(self) -> DeviceMemory | None:
        """Return the memory use of the trainer's device; None on a CPU."""
        return None

    async def wait_for_failure(self) -> FurlongError:
        """Return the error to end the run with, once a training process dies between calls; by default, never."""
        await asyncio.Event().wait()
        raise AssertionError

    def stack_traces(self) -> Mapping[str, str]:
        """Return the stack traces of the training processes by process name. Called from the hang watchdog's thread."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Release all resources."""


# What else a model's head computes for each response token: its likeliest tokens; the log-probs of the tokens in the
# column `teacher_top_ids`; its input; the KL to the teacher over the vocabulary (needs `MicroBatch.teacher_hidden_RD`).
HeadOutput = Literal["", "top_ids", "top_log_probs", "hidden", "teacher_kl"]


@dataclass(frozen=True)
class TokenStats:
    """Results of a forward pass for each response token, float32 [R].

    log_probs_R: of a policy; [0] for a value model. values_R: of a value model: the prediction from the tokens before.
    logits_RV: only for losses with `needs_logits`.
    top_ids_RK, top_log_probs_RK, hidden_RD, teacher_kl_R: only if requested (`HeadOutput`).
    policy_routes: the experts that the policy's own routers chose, for `MicroBatch.policy_routes`.
    rerouted_R: fraction of the engine's expert choices for the token before, over all layers, that the policy's routers
        would not have made; nan where unknown, None if routes were not recorded.
    """

    log_probs_R: Tensor
    entropy_R: Tensor | None = None
    logits_RV: Tensor | None = None
    policy_routes: Tensor | None = None
    rerouted_R: Tensor | None = None
    values_R: Tensor | None = None
    top_ids_RK: Tensor | None = None
    top_log_probs_RK: Tensor | None = None
    hidden_RD: Tensor | None = None
    teacher_kl_R: Tensor | None = None

    @property
    def output_R(self) -> Tensor:  # noqa: N802  axes
        """What the model's head gives per token: values, or log-probs."""
        return self.log_probs_R if self.values_R is None else self.values_R


class LossFn(Protocol):
    """A loss over one packed micro-batch.

    The loss is a sum of per-token terms times `micro.weight_R`, so the losses of all micro-batches and ranks add up to
    the loss of the optimizer step.

    needs_entropy: whether `stats.entropy_R` must be computed. entropy_grad: whether the gradient flows through it.
    needs_logits: whether `stats.logits_RV` must be kept (custom losses; costs [R, V] memory).
    A loss may also have `head_output`, which is "" by default.
    """

    needs_entropy: bool
    entropy_grad: bool
    needs_logits: bool

    def __call__(self, micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        """Return the scalar loss and metrics."""
        ...


class WeightSync:
    """Sends the trainer's weights to the engines and verifies that they arrived.

    This class sends nothing, for runs without engines: SFT without evaluation, training from a dump.
    """

    async def update_weights(self, version: int) -> SyncReport:
        """Load the trainer's weights into every engine as `version`. Raises SyncError if a checksum differs."""
        return SyncReport(version, num_tensors=0, num_bytes=0, seconds=0.0)

    async def finish_verification(self) -> dict[str, str]:
        """Wait for a running verification; return its checksums, {} without one. Raises SyncError if one differs."""
        return {}

    async def close(self) -> None:
        """Release process groups, folders and buffers."""


class EngineMemory(Protocol):
    """One engine, or all engines, whose device memory can be released."""

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of these tags; its contents are lost. Raises EngineError while requests run."""
        ...

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate the memory of these tags again; its contents are undefined."""
        ...


class DeviceSharing:
    """Hands the devices over between training and generation.

    This class does nothing, for trainer and engines on separate devices. `loop.device_sharing` has the other one.
    """

    is_colocated = False

    async def make_room(self) -> None:
        """Offload the trainer before engines start on its devices."""

    async def release_engines(self) -> None:
        """Release the memory of engines that have started, before the trainer is built on their devices."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Reserve the devices for training."""
        return nullcontext()

    def updating_weights(self) -> AbstractAsyncContextManager[None]:
        """Reserve the devices while the trainer's weights are read or written: to update engines, to save, to load."""
        return nullcontext()

    def generating(self) -> AbstractAsyncContextManager[None]:
        """Reserve the devices for generation."""
        return nullcontext()

    @asynccontextmanager
    async def starting(self) -> AsyncGenerator[Callable[[EngineMemory], Awaitable[None]]]:
        """Keep the trainer off the devices while an engine starts.

        Yields a function that releases the memory of the new engine that the other engines have released.
        """
        yield _keep_memory

    def reloading(self) -> AbstractAsyncContextManager[None]:
        """Reserve the devices to load weights into one engine. Raises SyncError if they are in use."""
        return nullcontext()

    def metrics(self) -> Metrics:
        """Return time and memory of the hand-overs since the last call."""
        return {}


async def _keep_memory(engine: EngineMemory) -> None:
    del engine


class DataSource(Protocol):
    """Hands out prompt groups, each exactly once per epoch."""

    def next_groups(self, n: int) -> list[Group]:
        """Return up to `n` groups, returned ones first; fewer only at the end of the last epoch, [] after it."""
        ...

    def return_groups(self, groups: Sequence[Group]) -> None:
        """Take back unfinished groups; they are handed out again before new ones."""
        ...

    def adopt(self, samples: list[Sample]) -> Group:
        """Return a group of samples that user code made; group, samples and completions get the next numbers."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values: epoch, cursor, counters, and the groups that were returned."""
        ...

    def restore(self, state: dict[str, Any], *, data_changed: bool = False) -> None:
        """Continue from `state`. Raises CheckpointError if the data differs from then, except with `data_changed`."""
        ...

    @property
    def groups_per_epoch(self) -> int | None:
        """Number of groups in one epoch; None until a streamed file has been read to its end."""
        ...

    @property
    def num_long_prompts(self) -> int:
        """Number of rows read so far that were dropped because their prompt is too long."""
        ...

    def close(self) -> None:
        """Close open files."""
        ...


class Reward(Protocol):
    """Scores the samples of one group."""

    async def __call__(self, group: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in order. An exception or timeout of user code is an outcome, not raised."""
        ...


class Rollout(Protocol):
    """Produces one rollout's batch from an engine, a dump, a file of demonstrations, or a user's function."""

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Return the samples of rollout `rollout_id`; None at the end of the data."""
        ...

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Generate and score the evaluation sets."""
        ...


class RolloutPool(Protocol):
    """The prompt groups in flight of a rollout, for asynchronous training and for checkpoints.

    If they are shared, a group that is running when a rollout is complete runs on, over weight updates, too, and any of
    the next rollouts may train on it. Otherwise each rollout has its own groups, and nothing runs between rollouts.
    """

    @property
    def is_shared(self) -> bool:
        """Whether rollouts share the groups in flight."""
        ...

    def admit(self, step: int, *, ahead: int, end: int, version: int) -> None:
        """Let groups start: `step` of `end` rollouts are trained, and the engines serve weights `version`.

        Groups issued and not trained on remain fewer than `ahead` + 1 batches.
        """
        ...

    def snapshot(self) -> list[tuple[str, Group]]:
        """Return copies of the groups in flight, each with its state, for `restore`."""
        ...

    def restore(self, saved: Sequence[tuple[str, Group]]) -> None:
        """Continue with the groups of a snapshot: what was not complete is issued again."""
        ...

    async def close(self) -> None:
        """Cancel what is still running."""
        ...


class Tracker(Protocol):
    """A sink for metrics."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the values of one step."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class Observer(Protocol):
    """Receives the events of a run, and may request its end."""

    def notify(self, event: str, **fields: Any) -> None:
        """Record an event such as `weight_update` or `save`. Fields must be JSON values. Thread-safe."""
        ...

    @property
    def stop_requested(self) -> bool:
        """Whether the run should end cleanly after the current step."""
        ...


class Ledger(Protocol):
    """Accounts for every prompt group: issued -> generated -> trained or dropped."""

    def issued(self, groups: Iterable[Group], rollout_id: int) -> None:
        """Record that the groups were handed to rollout `rollout_id`."""
        ...

    def held(self, group: Group, rollout_id: int) -> None:
        """Record that the rollout function kept the group for a call after that of rollout `rollout_id`."""
        ...

    def generated(self, group: Group, rollout_id: int) -> None:
        """Record that all samples of the group are complete and scored."""
        ...

    def dropped(self, group: Group, reason: str) -> None:
        """Record that the group will not be trained on."""
        ...

    def returned(self, group: Group, reason: str) -> None:
        """Record that the unfinished group went back to the data source."""
        ...

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        """Record that the groups were trained on in the optimizer steps of rollout `step`."""
        ...

    def restored(self, group_ids: Iterable[int], rollout_id: int) -> None:
        """Record that the checkpoint contained these groups, generated for rollout `rollout_id`."""
        ...

    def data_changed(self) -> None:
        """Record that the run resumed with other data."""
        ...

    def ended(self, *, is_saved: bool) -> None:
        """Record that the run ended early; groups generated ahead are in a checkpoint (`is_saved`) or given up."""
        ...

    def mark(self) -> dict[str, Any]:
        """Flush to disk and return the position for a checkpoint."""
        ...


@dataclass(frozen=True)
class Parts:
    """Everything that the loop drives. `wiring` builds and closes it."""

    trainer: Trainer
    sync: WeightSync
    rollout: Rollout
    source: DataSource
    ledger: Ledger
    device_sharing: DeviceSharing
    trackers: Sequence[Tracker]
    observer: Observer
    engine: Engine | None = None
    pool: RolloutPool | None = None
