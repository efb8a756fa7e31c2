"""From a configuration to the parts of a run: the only package that names concrete classes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.config.checks.validate import validate
from furlong.config.command_line import Resolved, command_of, without_credentials
from furlong.config.critic import critic_settings
from furlong.config.engine_groups import is_split, trained_model
from furlong.config.evaluation import used_eval_specs
from furlong.config.facts import FrozenModel, frozen_models, gets_random_key, model_folder
from furlong.config.hooks import usable_hooks
from furlong.config.sections import Config
from furlong.config.topology import uses_ray
from furlong.core.model_config import read_json
from furlong.core.text import random_key
from furlong.data.ledger import FileLedger
from furlong.data.prompt_path import PromptDataPath
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import MonitorSuite, RunFacts, RunMonitor
from furlong.errors import ConfigError
from furlong.files.checkpoint_folder import find_checkpoint, find_foreign_weights, find_resume_folder
from furlong.files.manifest import MANIFEST
from furlong.files.run_inputs import InputKind, RunInput, RunInputs
from furlong.inference.supervisor.launch import check_startable
from furlong.interfaces import DataSource, Parts, Tracker
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.machine import MemoryUse
from furlong.models.hf_folder import WEIGHT_FILES, read_weight_map
from furlong.models.tokenizer import read_template, write_template
from furlong.rewards.group_reward import GroupReward
from furlong.rollout.agents import AgentHooks
from furlong.rollout.teachers import Teachers
from furlong.tracking.console import ConsoleTracker
from furlong.tracking.model_card import write_card
from furlong.tracking.run_files import EVENTS, EventLog, StepFile, read_steps
from furlong.tracking.trackers import (
    JsonlTracker,
    MlflowTracker,
    SwanlabTracker,
    TensorBoardTracker,
    Trackers,
    TrackioTracker,
    WandbTracker,
)
from furlong.training.local_trainer import FrozenTrainer
from furlong.wiring.cluster import Cluster, build_cluster, build_ray_trainer
from furlong.wiring.context import RunContext, close_all, start_functions
from furlong.wiring.engine import ServingParts, Start, build_serving, warn_of_sharing
from furlong.wiring.rollout import (
    MODEL,
    build_agent_hooks,
    build_gateway,
    build_rollout,
    build_session_server,
    build_source,
    pool_of,
    prompt_paths,
)
from furlong.wiring.training import TrainingParts, build_trainer, seed_everything

if TYPE_CHECKING:
    from furlong.sessions.served_model import Gateway
    from furlong.sessions.session_server import SessionServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A run that is ready to start. Stages of `starting` go one after the other, what is in one at the same time."""

    parts: Parts
    schedule: RunSchedule
    checkpoints: Checkpoints
    ledger: FileLedger
    serving: ServingParts
    rewards: Sequence[GroupReward | Teachers]
    watch: RunMonitor
    files: Sequence[StepFile] = ()
    starting: Sequence[Sequence[Start]] = ()
    cluster: Cluster | None = None
    listeners: Sequence[Gateway | SessionServer] = ()
    hooks: AgentHooks | None = None

    async def start(self) -> None:
        """Start functions and what runs elsewhere: what cannot be ends the run before it begins."""
        await start_functions(self.rewards, self.hooks, self.listeners)
        for stage in self.starting:
            await asyncio.gather(*(start() for start in stage))

    async def close(self) -> None:
        """Stop all threads and processes, even if one raises."""
        inputs, hooks, cluster = self.checkpoints.inputs, self.hooks, self.cluster
        await close_all(
            *(listener.close for listener in self.listeners),
            self.serving.close,
            self.parts.trainer.close,
            None if inputs is None else inputs.close,
            self.parts.source.close,
            *(reward.close for reward in self.rewards),
            None if hooks is None else hooks.tear_down,
            None if cluster is None else cluster.close,
        )

    def queues(self) -> dict[str, int]:
        """Return the number of running and waiting requests of the engine in this process."""
        engine = self.serving.engine
        return {} if engine is None else engine.queue_lengths()

    def close_files(self) -> None:
        """Write out what is buffered."""
        with contextlib.ExitStack() as stack:
            for each in (*self.files, *self.parts.trackers, self.ledger):
                stack.callback(each.close)


def build(resolved: Resolved, folder: Path) -> Built:
    """Build everything that the loop drives. Raises ConfigError or DataError before anything is started."""
    config, client_key = resolved.config, resolved.config.cluster.sglang_api_key
    if gets_random_key(config):  # which user functions do not need: what they post to cannot change weights
        cluster = dataclasses.replace(config.cluster, sglang_api_key=random_key("ek"))
        config = dataclasses.replace(config, cluster=cluster)
    context = dataclasses.replace(RunContext.read(config, usable_hooks(config), folder), client_key=client_key)
    context = context.with_routers({})
    with contextlib.ExitStack() as opened:  # what is open is closed if a later part cannot be built
        built = _build(context, resolved, opened)
        opened.pop_all()
    return built


def _build(context: RunContext, resolved: Resolved, opened: contextlib.ExitStack) -> Built:
    config = context.config
    specs = used_eval_specs(config)
    if (inputs := build_inputs(context)) is not None:
        opened.callback(inputs.close)
    checkpoints = build_checkpoints(context, inputs, resolved)
    ledger = build_ledger(context, checkpoints.peek())
    opened.callback(ledger.close)
    source = build_source(context, ledger)
    opened.callback(source.close)
    schedule = build_schedule(context, source, has_eval=bool(specs))
    seed_everything(config.train.seed)
    watch = build_monitor(context, schedule.num_rollout)
    opened.callback(watch.close)
    cluster = build_cluster(context, on_event=watch.notify) if uses_ray(config) else None
    if cluster is not None:
        opened.callback(cluster.close)
        if problems := validate(config, device_type=cluster.device):  # of GPUs, which only the cluster knows
            raise ConfigError(*problems)
        context = context.on(cluster.device)
    if config.cluster.colocate and context.device == "cuda":
        warn_of_sharing(config, resolved.sources)
    generates = not config.debug.debug_train_only and (config.algo.loss_type != "sft_loss" or bool(specs))
    if generates:
        check_startable(config, context.device)
    if config.debug.debug_rollout_only:
        training = TrainingParts(FrozenTrainer())
    elif cluster is None:
        training = TrainingParts(build_trainer(context, schedule.num_rollout))
    else:
        ray_trainer = build_ray_trainer(context, cluster, schedule.num_rollout, on_event=watch.notify)
        training = TrainingParts(ray_trainer, ray_trainer)
    serving = build_serving(context, training, cluster, watch, opened) if generates else ServingParts()
    engine = serving.engine
    routers, gateway = serving.router_addresses, None
    session_server = None if engine is None else build_session_server(context, specs, opened)
    has_random_key = config.cluster.sglang_api_key != context.client_key
    if engine is not None and (not routers or (has_random_key and is_split(trained_model(config).groups))):
        gateway = build_gateway(context, engine, specs, opened)
        name = trained_model(config).name if routers else MODEL
        routers = routers if gateway is None else {**routers, name: gateway.address}
    rollout_context = dataclasses.replace(
        context.with_routers(routers), session_server=session_server, on_event=watch.notify
    )
    rollout = build_rollout(rollout_context, engine, source, ledger, specs)
    return Built(
        parts=Parts(
            trainer=training.trainer,
            sync=serving.sync,
            rollout=rollout,
            source=source,
            ledger=ledger,
            device_sharing=serving.device_sharing,
            trackers=[watch],
            engine=engine,
            pool=pool_of(rollout),
            observer=watch,
        ),
        schedule=schedule,
        checkpoints=checkpoints,
        ledger=ledger,
        serving=serving,
        rewards=context.rewards,
        watch=watch,
        files=context.files,
        starting=_stages(config, training, serving),
        cluster=cluster,
        hooks=build_agent_hooks(context),
        listeners=[each for each in (gateway, session_server) if each is not None],
    )


def _stages(config: Config, training: TrainingParts, serving: ServingParts) -> Sequence[Sequence[Start]]:
    """Return the start-up stages, each of parts that start concurrently.

    Engines take a minute or more to start. Those that share devices with the trainer start first, while its processes
    import, and leave the devices before the model is built; a trainer of this process, which has its model already,
    leaves them instead.
    """
    ranks, sharing = training.ray_trainer, serving.device_sharing
    if ranks is None:
        return [[sharing.make_room], serving.starting] if config.cluster.colocate else [serving.starting]
    if not config.cluster.colocate:

        async def start_ranks() -> None:
            await ranks.open()
            await ranks.start()

        return [[start_ranks, *serving.starting]]
    return [[ranks.open, *serving.starting], [sharing.release_engines], [ranks.start]]


def build_schedule(context: RunContext, source: DataSource, *, has_eval: bool) -> RunSchedule:
    """Derive the loop's schedule. Raises ConfigError if the number of rollouts cannot be known."""
    config = context.config
    num_rollout, per_epoch = config.data.num_rollout, source.groups_per_epoch
    if per_epoch is not None and num_rollout and per_epoch < config.data.rollout_batch_size:
        logger.warning(
            "--rollout-batch-size %d is more than the %d prompts of the data: prompts repeat within a rollout",
            config.data.rollout_batch_size,
            per_epoch,
        )
    if num_rollout is None:
        if per_epoch is None:
            raise ConfigError(
                "--num-epoch with --streaming-data: the number of rows is unknown until they are read; "
                "use --num-rollout"
            )
        num_epoch, batch_size = int(config.data.num_epoch or 1), config.data.rollout_batch_size
        if per_epoch * num_epoch < batch_size:
            raise ConfigError(
                f"--num-epoch {num_epoch} of {per_epoch} prompts is less than one rollout of --rollout-batch-size "
                f"{batch_size}; lower it, or use more prompts or epochs"
            )
        num_rollout = per_epoch * num_epoch // batch_size
        logger.info(
            "%d rollouts: %d prompts x %s epochs / %d prompts each",
            num_rollout,
            per_epoch,
            config.data.num_epoch,
            config.data.rollout_batch_size,
        )
    return RunSchedule(
        num_rollout=num_rollout,
        ahead=config.rollout.async_buffer_size or 0,
        staleness_bound=config.rollout.max_token_staleness,
        update_weights_interval=config.sync.update_weights_interval,
        pause_mode=config.sync.pause_mode,
        save_every=config.checkpoint.save_interval,
        eval_every=(config.eval.eval_interval or max(num_rollout, 1)) if has_eval else None,
        eval_before_train=not config.eval.skip_eval_before_train,
        saves_on_hang=config.fault.on_hang == "stop" and config.checkpoint.save is not None,
    )


def build_checkpoints(context: RunContext, inputs: RunInputs | None, resolved: Resolved) -> Checkpoints:
    """Build the loader and saver of checkpoints, which compares and records `inputs`."""
    config = context.config
    flags, template = config.checkpoint, config.data.chat_template_path
    export = flags.save_hf if "{rollout_id}" in (flags.save_hf or "") else None
    chat_template = None if template is None else read_template(template)

    names = resolved.hub.names

    def finish_export(folder: Path) -> None:
        if chat_template is not None:
            write_template(folder, chat_template)
        is_sft = config.algo.loss_type == "sft_loss"
        files = dict.fromkeys(prompt_paths(config), "training") if context.reads_prompt_file else {}
        files |= {spec.path: f"evaluation ({spec.name})" for spec in used_eval_specs(config)}
        write_card(
            folder,
            name=str(config.track.run_name),
            base=names.get(str(config.rollout.hf_checkpoint), str(config.rollout.hf_checkpoint)),
            algorithm="sft" if is_sft else config.algo.advantage_estimator,
            command=command_of(resolved),
            data={names.get(file, file): use for file, use in files.items()},
            steps=read_steps(context.folder),
        )

    return Checkpoints(
        save_dir=None if flags.save is None else Path(flags.save),
        load_dir=find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune),
        load_step=flags.ckpt_step,
        keep=flags.keep_checkpoints,
        retain_interval=flags.save_retain_interval,
        start=config.data.start_rollout_id,
        in_background=flags.async_save,
        inputs=inputs,
        hub=resolved.hub.commits,
        hf_folder=_folder_of_step(export),
        critic_folder=_folder_of_step(critic_settings(config).save) if config.algo.uses_critic else None,
        model_folder=model_folder(config, context.folder),
        needs_model=flags.save_hf is not None,
        finish_export=finish_export,
    )


def _folder_of_step(template: str | None) -> Callable[[int], Path] | None:
    return None if template is None else lambda step: Path(template.replace("{rollout_id}", str(step)))


def build_ledger(context: RunContext, resumed: tuple[int, dict[str, Any]] | None) -> FileLedger:
    """Open the ledger, at the position (step, mark) of the checkpoint that the run resumes from, if any."""
    path = context.folder / "ledger.jsonl"
    may_wait = context.hooks.buffer_filter is not None or context.hooks.data_source is not None
    if resumed is None:
        return FileLedger(path, may_wait=may_wait)
    if not path.exists():
        logger.warning(
            "--load %s resumes a run whose ledger is not in %s; a new ledger starts at step %d, and the audit does "
            "not cover earlier steps",
            context.config.checkpoint.load,
            context.folder,
            resumed[0],
        )
        return FileLedger(path, is_partial=True, may_wait=may_wait)
    return FileLedger.resume(path, resumed[1], may_wait=may_wait)


def build_monitor(context: RunContext, num_steps: int) -> RunMonitor:
    """Build the trackers, the event log, and the monitors that check both."""
    return RunMonitor(
        MonitorSuite(MONITORS, RunFacts.of(context.config)),
        trackers=_trackers(context, num_steps),
        events=EventLog(context.folder / EVENTS),
        on_diagnosis=context.config.fault.on_diagnosis,
        earlier=lambda: read_steps(context.folder),
        measured=_host_memory,
    )


def _host_memory() -> dict[str, float]:
    memory = MemoryUse.of_machine()
    return {} if memory is None else {"perf/host_memory_frac": memory.share}


def _trackers(context: RunContext, num_steps: int) -> Trackers:
    track = context.config.track
    builders: dict[str, Callable[[], Tracker]] = {
        "metrics.jsonl": lambda: JsonlTracker(context.folder / "metrics.jsonl"),
        "console": lambda: ConsoleTracker(num_steps=num_steps),
    }
    if track.use_tensorboard:
        folder = context.folder.joinpath(*filter(None, (track.tb_project_name, track.tb_experiment_name)))
        builders["tensorboard"] = lambda: TensorBoardTracker(folder)
    values: dict[str, Any] = without_credentials(context.args.as_dict() | {"wandb_key": None})
    if track.use_wandb:
        builders["wandb"] = lambda: WandbTracker(track, values)
    if track.use_trackio:
        is_resumed = (context.folder / "metrics.jsonl").exists()
        builders["trackio"] = lambda: TrackioTracker(track, values, is_resumed=is_resumed)
    if track.use_mlflow:
        builders["mlflow"] = lambda: MlflowTracker(track, values)
    if track.use_swanlab:
        builders["swanlab"] = lambda: SwanlabTracker(track, values, context.folder)
    return Trackers.open(builders, context.tables)


# not what is trained
IGNORED_KEYS = ("transformers_version", "_name_or_path", "chat_template", "padding", "truncation")
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")
SLOW_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")


def build_inputs(context: RunContext) -> RunInputs | None:
    """Begin to read the inputs of a run that saves or resumes; None for any other run."""
    flags = context.config.checkpoint
    resumed = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if flags.save is None and resumed is None:
        return None
    inputs = RunInputs(list(_inputs(context)), accepted=flags.allow_changed_inputs)
    inputs.start()
    return inputs


def _inputs(context: RunContext) -> Iterator[RunInput]:
    folder, config = context.model_dir, context.config
    source = f"--hf-checkpoint {folder}"
    if context.reads_prompt_file:
        yield prompt_files(prompt_paths(config))
    slow = () if (folder / "tokenizer.json").is_file() else SLOW_TOKENIZER_FILES
    files = [folder / name for name in slow if (folder / name).is_file()]
    yield RunInput("tokenizer", f"{source} (tokenizer)", files, partial(_contents, folder, TOKENIZER_FILES))
    path = config.data.chat_template_path
    template = getattr(context.tokenizer, "chat_template", None)
    template_source = f"{source} (chat template)" if path is None else f"--chat-template-path {path}"
    yield RunInput("chat-template", template_source, settings=lambda: template)
    yield RunInput("config", f"{source} ({', '.join(CONFIG_FILES)})", (), partial(_contents, folder, CONFIG_FILES))
    yield RunInput("weights", f"{source} (weights)", _weight_files(folder))
    yield from map(_frozen, frozen_models(config))


def prompt_files(paths: Iterable[str]) -> RunInput:
    """The files of --prompt-data, or those of several environments."""
    different = list(dict.fromkeys(paths))
    locations = [PromptDataPath.parse(path) for path in different]
    files = [file for location in locations for file in location.files()]
    rows = [location.fingerprint() for location in locations if location.kind == "objects"]
    return RunInput("data", f"--prompt-data {' '.join(different)}", files, (lambda: rows) if rows else None)


def _frozen(model: FrozenModel) -> RunInput:
    """A frozen model: weights and config of a Hugging Face folder, or the manifest of a checkpoint."""
    folder, step = Path(model.load), model.step
    name: InputKind = "reference" if model.role == "ref" else "teacher"
    source = f"{model.flag} {folder}"
    foreign = find_foreign_weights(folder, step=step)
    if foreign is None:
        checkpoint = find_checkpoint(folder, step=step, save_dir=None, flag=model.flag)
        assert checkpoint is not None  # without save_dir a missing checkpoint raises
        return RunInput(name, source, [checkpoint / MANIFEST], follows_path=True)
    if (foreign / "config.json").is_file():
        settings = partial(_contents, foreign, CONFIG_FILES)
        return RunInput(name, source, _weight_files(foreign), settings, follows_path=True)
    return RunInput(name, source, sorted(p for p in foreign.iterdir() if p.is_file()), follows_path=True)


def _weight_files(folder: Path) -> list[Path]:
    single, index = WEIGHT_FILES
    names = sorted(set(read_weight_map(folder / index).values())) if (folder / index).is_file() else [single]
    return [folder / name for name in names if (folder / name).is_file()]


def _contents(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    contents = {name: read_json(folder / name) for name in names}
    return {
        name: {key: value for key, value in content.items() if key not in IGNORED_KEYS}
        for name, content in contents.items()
    }
