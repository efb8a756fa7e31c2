"""The context that the parts of a run are built from."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from furlong.config.args_view import Args
from furlong.config.hooks import Hooks
from furlong.config.sections import Config
from furlong.core.sample import Group, Sample
from furlong.models.hf_config import context_length, vocabulary_size
from furlong.models.tokenizer import load_tokenizer, read_template
from furlong.rewards.group_reward import GroupReward
from furlong.rewards.sandbox import Sandbox
from furlong.rollout.agents import AgentHooks
from furlong.rollout.episodes import EpisodeLoad
from furlong.rollout.generate import ignored
from furlong.rollout.teachers import Teachers
from furlong.sandboxes.code_sandbox import ISOLATION
from furlong.tracking.rollout_dump import SAMPLES, RolloutDumps
from furlong.tracking.run_files import StepFile
from furlong.tracking.trackers import TRAINED, SampleTables

if TYPE_CHECKING:
    from furlong.sessions.served_model import Gateway
    from furlong.sessions.session_server import SessionServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunContext:
    """The configuration with its hooks, tokenizer, device and dtype.

    rewards (with teachers), files: collected while parts are built, to be closed at the end. load: permits of all
    episodes.
    verifier_sandboxes: by verifier, shared by all rewards, so that training and evaluation use the same workers.
    client_key: that user functions send to the addresses in `args`; None for no key. on_event: records events.
    """

    config: Config
    hooks: Hooks
    args: Args
    folder: Path
    model_dir: Path
    tokenizer: Any
    context_len: int
    vocab_size: int
    device: str
    dtype: torch.dtype
    dumps: RolloutDumps
    tables: SampleTables = field(default_factory=lambda: SampleTables(None))
    rewards: list[GroupReward | Teachers] = field(default_factory=list[GroupReward | Teachers])
    verifier_sandboxes: dict[str, Sandbox] = field(default_factory=dict[str, Sandbox])
    files: list[StepFile] = field(default_factory=list[StepFile])
    load: EpisodeLoad = field(default_factory=EpisodeLoad)
    session_server: SessionServer | None = None
    client_key: str | None = None
    on_event: Callable[..., object] = ignored

    def __post_init__(self) -> None:
        os.environ[ISOLATION] = self.config.session.sandbox_isolation  # also for functions in worker processes

    @staticmethod
    def read(config: Config, hooks: Hooks, folder: Path) -> RunContext:
        """Read the tokenizer and the model's config, and detect the device. Raises ConfigError."""
        model_dir = Path(str(config.rollout.hf_checkpoint))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return RunContext(
            config=config,
            hooks=hooks,
            args=Args(config),
            load=EpisodeLoad(config.rollout.max_concurrent_episodes),
            folder=folder,
            model_dir=model_dir,
            tokenizer=read_tokenizer(model_dir, config.data.chat_template_path),
            context_len=context_length(model_dir),
            vocab_size=vocabulary_size(model_dir),
            device=device,
            dtype=_training_dtype(config, device),
            dumps=_dumps(config, folder),
            tables=SampleTables(config.track.log_samples),
            client_key=config.cluster.sglang_api_key,
        )

    def record_rollout(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Dump the groups of a training rollout, and show samples to trackers, if flags ask for that."""
        self.dumps.save(rollout_id, groups)
        self.tables.add(rollout_id + 1, TRAINED, [sample for group in groups for sample in group.samples])

    def record_evaluation(self, rollout_id: int, name: str, samples: Sequence[Sample]) -> None:
        """Do the same with the samples of an evaluation set."""
        self.dumps.save_evaluation(rollout_id, name, samples)
        self.tables.add(rollout_id, name, samples)

    @property
    def reads_prompt_file(self) -> bool:
        """Whether prompts come from --prompt-data."""
        config, data = self.config, self.config.data
        has_other_source = self.hooks.data_source is not None or config.debug.load_debug_rollout_data is not None
        return data.prompt_data is not None and data.rollout_global_dataset and not has_other_source

    def with_routers(self, routers: Mapping[str, tuple[str, int]]) -> RunContext:
        """Return a copy whose `args` contain the addresses of the run's routers, and the key of clients."""
        cluster = dataclasses.replace(self.config.cluster, sglang_api_key=self.client_key)
        return dataclasses.replace(self, args=Args(dataclasses.replace(self.config, cluster=cluster), routers))

    def on(self, device: str) -> RunContext:
        """Return a copy for trainer and engines on "cuda" or "cpu", which this process may not have."""
        if device == self.device:
            return self
        return dataclasses.replace(self, device=device, dtype=_training_dtype(self.config, device))


async def start_functions(
    rewards: Sequence[GroupReward | Teachers], hooks: AgentHooks | None, listeners: Sequence[Gateway | SessionServer]
) -> None:
    """Load reward functions, set up agents, and answer their requests."""
    for reward in rewards:
        await reward.start()
    if hooks is not None:
        await hooks.set_up()
    for listener in listeners:
        await listener.start()


async def close_all(*closes: Callable[[], Any] | None) -> None:
    """Call these in order, even if one raises; a result that can be awaited is."""

    async def call(close: Callable[[], Any]) -> None:
        if inspect.isawaitable(result := close()):
            await result

    async with contextlib.AsyncExitStack() as stack:  # the last one first
        for close in reversed(closes):
            if close is not None:
                stack.push_async_callback(call, close)


def read_tokenizer(model_dir: Path, template: str | None) -> Any:
    """Load the tokenizer, and replace its chat template if `template` is given. Raises ConfigError."""
    tokenizer = load_tokenizer(model_dir)
    if template is not None:
        tokenizer.chat_template = read_template(template)
        logger.info("chat template %s replaces the one of %s", template, model_dir)
    return tokenizer


def _dumps(config: Config, folder: Path) -> RolloutDumps:
    debug = config.debug
    if debug.save_debug_rollout_data is not None or not debug.keep_samples:
        return RolloutDumps(debug.save_debug_rollout_data)
    return RolloutDumps(str(folder / SAMPLES), newest=debug.keep_samples)


def _training_dtype(config: Config, device: str) -> torch.dtype:
    """Return the precision of training: from the flags, or bfloat16 on a GPU and float32 on a CPU."""
    if config.train.bf16 or config.train.fp32:
        return torch.bfloat16 if config.train.bf16 else torch.float32
    chosen = torch.bfloat16 if device == "cuda" else torch.float32
    logger.info(
        "dtype %s: no precision flag is given and training runs on %s", str(chosen).removeprefix("torch."), device
    )
    return chosen
