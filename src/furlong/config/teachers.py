"""Teachers of `--opd-type sglang` by name: servers, frozen models of `--sglang-config`, and folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from furlong.config.checks.value_checks import model_problem, url_problem
from furlong.config.engine_groups import served_models
from furlong.config.sections import Config
from furlong.core.text import abbreviate
from furlong.errors import ConfigError

ASKS, READS = (f"rollout.on_policy_distillation.{name}" for name in ("reward_func", "post_process_rewards"))
DEFAULT = "default"  # scores samples that name no teacher; so does a teacher that is the only one
MESSAGES = "prompt_messages"  # metadata: messages of a prompt, for a teacher that renders its own template


@dataclass(frozen=True)
class TeacherSpec:
    """One teacher: `url` of a server, `folder` of a model, or neither for the model of that name in --sglang-config.

    tokenizer: folder of its tokenizer if it is not the policy's.
    """

    name: str
    url: str | None = None
    folder: str | None = None
    tokenizer: str | None = None


def _named(text: str) -> tuple[str, str]:
    """Split NAME=VALUE; without a name, that is `DEFAULT`."""
    name, is_named, value = text.partition("=")
    return (name, value) if is_named and "/" not in name else (DEFAULT, text)


def teacher_specs(config: Config) -> list[TeacherSpec]:
    """Return the teachers that are asked during the rollout; [] if user functions ask, or there are none."""
    opd, reward = config.opd, config.reward
    if not opd.use_opd or opd.has_teacher_model:
        return []
    named = [_named(text) for text in opd.opd_teacher_urls or ()]
    is_slimes = is_asked_for(reward.custom_rm_path, reward.custom_reward_post_process_path)
    is_free = reward.custom_rm_path is None and reward.rm_type is None
    if not named and reward.rm_url is not None and (is_slimes or is_free):
        named = [(DEFAULT, reward.rm_url)]
    values: dict[str, str | None] = dict(named)
    if opd.opd_teacher_urls or reward.custom_rm_path is None:
        values |= {m.name: None for m in served_models(config) if not m.is_trained and m.name not in values}
    tokenizers = dict(map(_named, opd.opd_teacher_tokenizer or ()))
    specs: list[TeacherSpec] = []
    for name, value in values.items():
        tokenizer = tokenizers.get(name) or (tokenizers.get(DEFAULT) if len(values) == 1 else None)
        url = value.rstrip("/").removesuffix("/generate") if value is not None and "://" in value else None
        specs.append(TeacherSpec(name, url, None if url else value, tokenizer))
    return specs


def is_asked_for(reward_path: str | None, process_path: str | None) -> bool:
    """Whether these are slime's reward function and its post-processing, instead of which the run asks the teacher.

    The leaves of an agent's episode share a reward, so that the reply to one of them would be taken for all.
    """
    return bool(reward_path and process_path) and str(reward_path).endswith(ASKS) and str(process_path).endswith(READS)


def teacher_of(name: object, names: list[str]) -> str | None:
    """Return the teacher of a sample whose metadata has `name`, or None; None if there is no such teacher."""
    if name is None:
        return DEFAULT if DEFAULT in names else names[0] if len(names) == 1 else None
    return str(name) if str(name) in names else None


def function_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with slime's functions that ask a teacher: one without the other, or nothing to ask."""
    opd, path = config.opd, config.reward.custom_rm_path
    process, slime = config.reward.custom_reward_post_process_path, "slime.rollout.on_policy_distillation"
    asks, reads = (path or "").endswith(ASKS), (process or "").endswith(READS)
    if (asks or reads) and not opd.use_opd:
        given = f"--custom-rm-path {path}" if asks else f"--custom-reward-post-process-path {process}"
        yield f"{given} is for a teacher, from which only --use-opd learns; add --use-opd"
    elif opd.opd_teacher_urls:
        return
    elif asks and process is None and opd.has_teacher_model:
        yield (
            f"--custom-rm-path {path} asks a teacher on a server, but that of --opd-type {opd.opd_type} is in the "
            "trainer; remove it"
        )
    elif asks and process is None:
        yield (
            f"--custom-rm-path {path} returns the teacher's reply; add --custom-reward-post-process-path "
            f"{slime}.post_process_rewards, which reads it"
        )
    if asks and config.reward.rm_url is None and not opd.has_teacher_model:
        yield f"--custom-rm-path {path} asks the teacher at --rm-url; add --rm-url http://HOST:PORT/generate"
    if path is None and reads:
        yield (
            f"--custom-reward-post-process-path {process} reads the teacher's replies; add --custom-rm-path "
            f"{slime}.reward_func, which asks it"
        )


def teacher_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the teachers of a configuration, before any of them is asked."""
    opd, rollout = config.opd, config.rollout
    try:
        specs = teacher_specs(config)
    except ConfigError:  # of --sglang-config, which is reported elsewhere
        return
    functions = [rollout.custom_generate_function_path, rollout.rollout_function_path]
    functions += [config.reward.custom_rm_path, config.reward.custom_reward_post_process_path]
    has_teacher = specs or any(functions) or opd.has_teacher_model or opd.opd_teacher_load is not None
    if not has_teacher and config.debug.load_debug_rollout_data is None:
        yield (
            "--use-opd has no teacher; add --opd-teacher-load FOLDER for one in the trainer, or --opd-teacher-urls "
            "NAME=URL for a server, or give a frozen model in --sglang-config"
        )
    if opd.opd_teacher_urls and rollout.rollout_function_path is not None:
        yield (
            f"--opd-teacher-urls with --rollout-function-path {rollout.rollout_function_path}, which generates samples "
            "itself: set sample.teacher_log_probs there, and remove --opd-teacher-urls"
        )
    names = [_named(text)[0] for text in opd.opd_teacher_urls or ()]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"--opd-teacher-urls has two teachers named {name!r}; give each another name"
    for spec in specs:
        where = f"--opd-teacher-urls {spec.name}"
        if not spec.name or spec.folder == "":
            yield f"--opd-teacher-urls {spec.name}={spec.url or spec.folder} lacks a name or a value; use NAME=URL"
            continue
        if spec.url and (problem := url_problem(where, spec.url)):
            yield problem
        if spec.folder and (problem := model_problem(where, spec.folder)):
            host, _, port = spec.folder.rpartition(":")
            is_address = bool(host) and port.split("/")[0].isdigit()
            yield f"{where} {spec.folder} is not a URL; use http://{spec.folder}" if is_address else problem
        if spec.tokenizer and not any(Path(spec.tokenizer).glob("tokenizer*.*")):
            yield f"--opd-teacher-tokenizer {spec.tokenizer}: no tokenizer there; give the folder of the teacher's"
        if spec.tokenizer and opd.opd_loss == "topk":
            yield (
                "--opd-teacher-tokenizer with --opd-loss topk: tokens of another vocabulary have no counterpart at "
                "each position; use --opd-loss sampled"
            )
    session = config.session
    agents = {"--environment": session.environment, "--agent-function-path": session.agent_function_path}
    for flag, given in (agents | {"--agent-command": session.agent_command}).items():
        if given and opd.opd_teacher_tokenizer:
            yield (
                f"--opd-teacher-tokenizer with {flag}: conversations of agents have the policy's chat template, which "
                "is not text; use a teacher with the policy's tokenizer"
            )
    for text in (opd.opd_teacher_tokenizer or ()) if specs else ():
        name = _named(text)[0]
        if teacher_of(None if name == DEFAULT else name, [spec.name for spec in specs]) is None:
            have = abbreviate([spec.name for spec in specs]) or "none"
            yield f"--opd-teacher-tokenizer {text} is of no teacher; the teachers are {have}: use NAME=FOLDER"
