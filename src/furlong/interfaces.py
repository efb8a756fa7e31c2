"""The seams of furlong: what the loop, the rollout and the trainers know of each other.

Each protocol has one file per implementation; `wiring/` alone chooses. The loop knows nothing else of what it drives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from furlong.core.batch import MicroBatch, RolloutBatch
from furlong.core.metric import Metrics
from furlong.core.outcome import Outcome
from furlong.core.pending_files import PendingFiles
from furlong.core.routing import Routes
from furlong.core.sample import Group, Sample
from furlong.core.weights import SyncReport, WeightSource
from furlong.errors import FurlongError

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["finish", "hold", "abort"]
Role = Literal["actor", "ref", "old_actor", "teacher"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion. Names are SGLang's; `top_k` -1 and `min_p` 0 mean off, temperature 0 is greedy.

    With a `sampling_seed` the completion depends on the prompt, the weights and the seed only, never on what else is
    in the batch. `return_routed_experts` changes nothing of it: the experts that its tokens went to are told as well.
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


@dataclass(frozen=True)
class Completion:
    """One response. `log_probs` are of log_softmax(logits / temperature) before top-p/top-k/min-p (SGLang's meaning).

    `versions` holds the weight version of each token. `finish_reason` "abort" carries what was generated until then.
    `routed_experts` [prompt + tokens - 1, layers, experts a token], where they were asked for; None if the request was
    aborted before its prompt was read.
    """

    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    text: str = ""
    cached_tokens: int = 0
    latency_s: float = 0.0
    routed_experts: Routes | None = field(default=None, compare=False)


class Engine(Protocol):
    """Generates. Implementations: `inference.embedded`, `inference.sglang.http_engine`."""

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Complete `prompt` (token ids). Raises EngineError for a prompt that does not fit the context."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: "finish" waits for running requests, "hold" keeps them, "abort" ends them now."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`; held requests continue with the weights that are loaded then."""
        ...

    async def abort(self, sessions: Collection[str]) -> None:
        """End the running and waiting requests of these sessions now; each answers with what it has."""
        ...

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        """Replace the weights; returns the checksum of every tensor as loaded, by Hugging Face name.

        Raises SyncError for a name or shape that the engine does not have, or a tensor that did not come.
        """
        ...

    async def close(self) -> None:
        """Release everything; running requests end with an EngineError."""
        ...


@runtime_checkable
class Starves(Protocol):
    """An engine whose servers can all be lost, and replaced by others that only a publication can give weights."""

    async def starved(self) -> None:
        """Return when it is so: no request is answered before weights are published."""
        ...


class Trainer(Protocol):
    """Driver side of training: in process, or a group of workers."""

    async def train(self, batch: RolloutBatch) -> Metrics:
        """Run all optimizer steps of one rollout."""
        ...

    def weights(self) -> WeightSource:
        """The policy's current weights under Hugging Face names."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and RNG into `folder`, which exists."""
        ...

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...

    async def save_hf(self, folder: Path) -> None:
        """Write a folder that transformers loads."""
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


@dataclass(frozen=True)
class TokenStats:
    """What a forward pass says of each response token, float32 [R].

    `logits_RV` is there only for a loss that asks for it. `own_routes`, for `MicroBatch.own_routes`, where the backend
    records routes. `rerouted_R`: share of the experts that the engine chose for the token before, over all layers,
    which the model would not have chosen; nan where that is not known, None where nothing was recorded.
    """

    log_probs_R: Tensor
    entropy_R: Tensor | None = None
    logits_RV: Tensor | None = None
    own_routes: Tensor | None = None
    rerouted_R: Tensor | None = None


class LossFn(Protocol):
    """A loss over one packed micro-batch.

    The loss is a sum of per-token terms times `micro.weight_R`, so losses of micro-batches and ranks add up to the
    loss of the step.
    """

    @property
    def needs_entropy(self) -> bool:
        """Whether `stats.entropy_R` is wanted."""
        ...

    @property
    def entropy_grad(self) -> bool:
        """Whether the loss has a gradient through the entropy."""
        ...

    @property
    def needs_logits(self) -> bool:
        """Whether `stats.logits_RV` is wanted (custom losses; costs [R, V] memory)."""
        ...

    def __call__(self, micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        """Return the scalar loss and metrics."""
        ...


@dataclass(frozen=True)
class OptimReport:
    """One optimizer step. `skipped` names why a step was not taken (a gradient that is not finite)."""

    grad_norm: float
    lr: float
    skipped: str = ""


class Backend(Protocol):
    """Rank side of training: all that a new training backend must write. `training.worker` drives it."""

    @property
    def device(self) -> Any:
        """The torch.device on which micro-batches are wanted."""
        ...

    def log_probs(self, micro: MicroBatch, *, model: Role = "actor", entropy: bool = False) -> TokenStats:
        """Log-probabilities of the response tokens under one of the models, without gradient."""
        ...

    def forward_backward(self, micro: MicroBatch, loss_fn: LossFn) -> Metrics:
        """Accumulate the gradient of `loss_fn` over one micro-batch."""
        ...

    def optim_step(self) -> OptimReport:
        """Clip, step, advance the schedule, zero the gradients."""
        ...

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments; the learning-rate schedule goes on."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under Hugging Face names, in a fixed order."""
        ...

    gives_live_weights: bool  # `named_weights` is known to give the model's own memory, and nothing made for the caller

    def copy_weights(self, source: Role, target: Role) -> None:
        """Make the `target` model equal to `source` (reference refresh, old actor)."""
        ...

    def save(self, folder: Path, later: PendingFiles | None = None) -> None:
        """Write weights, optimizer, schedule and RNG; with `later` copies are held there and nothing is written."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...

    def save_hf(self, folder: Path) -> None:
        """Write a folder that transformers loads."""
        ...


@runtime_checkable
class HasGradients(Protocol):
    """A backend that shows the gradients it has accumulated."""

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients before the optimizer's step, by parameter; of a sharded one, this rank's part."""
        ...


@runtime_checkable
class TimesLayers(Protocol):
    """A backend that knows how long its rank's own layers take."""

    @property
    def layer_seconds(self) -> Callable[[], float | None]:
        """Gives the seconds that the policy's layers took in forward passes since the last call; None if not timed."""
        ...


@dataclass(frozen=True)
class Moved:
    """What was moved between a device and the host, and how long it took."""

    num_bytes: int
    seconds: float


@runtime_checkable
class Snapshots(Protocol):
    """A trainer whose checkpoints can be written while it goes on."""

    async def snapshot(self, folder: Path) -> PendingFiles:
        """Copy what `Trainer.save` writes to host memory, as files of `folder` that any thread may write."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """A trainer whose processes can end while nobody calls them."""

    async def lost(self) -> FurlongError:
        """Wait until one has; returns what to end the run with."""
        ...


@runtime_checkable
class Visible(Protocol):
    """A trainer whose processes can be looked into."""

    def stacks(self) -> Mapping[str, str]:
        """The stacks of each process by its name; called from a thread that watches the run."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """A backend that can leave its device; engines take its place meanwhile."""

    def sleep(self) -> Moved:
        """Move parameters, masters and moments to host memory and give the device's memory back."""
        ...

    def wake(self) -> Moved:
        """Move them back."""
        ...


@runtime_checkable
class PipelinedBackend(Protocol):
    """A backend that has several micro-batches at work at a time: it is given those of a whole optimizer step."""

    def log_probs_of(
        self, micros: Sequence[MicroBatch], *, model: Role = "actor", entropy: bool = False
    ) -> list[TokenStats]:
        """`Backend.log_probs` of each."""
        ...

    def forward_backward_of(self, micros: Sequence[MicroBatch], loss_fn: LossFn) -> list[Metrics]:
        """`Backend.forward_backward` of each, in order."""
        ...


class WeightSync(Protocol):
    """Carries weights from the trainer to the engines and verifies that they arrived."""

    async def publish(self, version: int) -> SyncReport:
        """Load the trainer's weights into every engine as `version`. Raises SyncError if a checksum differs."""
        ...


@runtime_checkable
class SettledSync(WeightSync, Protocol):
    """A weight sync that may verify a publication while engines generate with it already."""

    async def settle(self) -> dict[str, str]:
        """Wait for that; returns its checksums, {} if nothing was waited for. Raises SyncError if one differs."""
        ...


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device: all that is in use, what there is, and what the trainer's process has of it.

    peak: the most that the trainer's tensors took since this was asked for the last time.
    """

    used: int
    total: int
    own: int
    peak: int = 0


class Residency(Protocol):
    """Who owns the device. Does nothing unless trainer and engine share one."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Hold the device for training."""
        ...

    def publishing(self) -> AbstractAsyncContextManager[None]:
        """Hold the device while the trainer's weights are read: to publish, to save, or to load."""
        ...

    def generating(self) -> AbstractAsyncContextManager[None]:
        """Hold the device for generation."""
        ...

    def metrics(self) -> Metrics:
        """What changing the owner took since the last call."""
        ...


class DataSource(Protocol):
    """Hands out prompt groups, each exactly once an epoch."""

    def next_groups(self, n: int) -> list[Group]:
        """Up to `n` groups, those given back first; fewer only at the end of the last epoch, [] after it."""
        ...

    def give_back(self, groups: Sequence[Group]) -> None:
        """Take unfinished groups back; they are handed out again before new ones."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able position: epoch, cursor, counters, and the groups given back."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the stream where `state` was taken. Raises CheckpointError if the data is another one."""
        ...

    @property
    def groups_per_epoch(self) -> int | None:
        """Number of groups in one epoch; None while a streamed file has not been read through."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class Reward(Protocol):
    """Scores the samples of one group."""

    async def __call__(self, group: Sequence[Sample]) -> list[Outcome]:
        """One outcome per sample, in order. User code that raises or hangs is an outcome, not an exception."""
        ...


class Rollout(Protocol):
    """Produces the batch of one rollout: from an engine, a dump, a file of demonstrations, or a user's function."""

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """The samples of rollout `rollout_id`; None when the data has ended."""
        ...

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Score the evaluation sets."""
        ...


class Tracker(Protocol):
    """A sink for metrics."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step's values."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


class Observer(Protocol):
    """Hears what happens in a run beside its metrics, and may ask for its end."""

    def notify(self, event: str, **fields: Any) -> None:
        """Something happened: `publication`, `save`, ... Fields have a JSON form. Callable from any thread."""
        ...

    @property
    def wants_end(self) -> bool:
        """Whether the run is to end in good order after this step."""
        ...


class Ledger(Protocol):
    """Accounts for every prompt group: issued -> generated -> trained or dropped."""

    def issued(self, groups: Iterable[Group], rollout_id: int) -> None:
        """These groups were handed to rollout `rollout_id`."""
        ...

    def generated(self, group: Group, rollout_id: int) -> None:
        """All samples of the group are there and scored."""
        ...

    def dropped(self, group: Group, reason: str) -> None:
        """The group will not be trained on."""
        ...

    def returned(self, group: Group, reason: str) -> None:
        """The group went back to the data source, unfinished."""
        ...

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        """The groups were part of the optimizer steps of rollout `step`."""
        ...

    def restored(self, group_ids: Iterable[int], rollout_id: int) -> None:
        """The checkpoint that the run goes on from held these groups, generated for rollout `rollout_id`."""
        ...

    def ended(self, *, is_saved: bool) -> None:
        """The run ends before its last rollout: groups of rollouts that are ahead are `is_saved`, or given up."""
        ...

    def mark(self) -> dict[str, Any]:
        """Flush to disk and return the position, to go into a checkpoint."""
        ...


@dataclass(frozen=True)
class Parts:
    """Everything the loop drives; `build` makes and closes it."""

    trainer: Trainer
    sync: WeightSync
    rollout: Rollout
    source: DataSource
    ledger: Ledger
    residency: Residency
    trackers: Sequence[Tracker]
    observer: Observer
    engine: Engine | None = None
