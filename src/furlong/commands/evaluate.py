"""`furlong eval`: evaluate a model or an endpoint on data files, procedural tasks and environments."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.commands.output import command_parser, json_option, show
from furlong.errors import ConfigError

if TYPE_CHECKING:
    from furlong.config.evaluation import EvalSpec
    from furlong.config.sections import Config
    from furlong.wiring.rollout import EndpointOptions

KEY_VARIABLE = "OPENAI_API_KEY"
DEFAULT_TASKS = 32  # of an environment without data
SHOWN_EVERY = 10  # progress lines of a set
# The evaluated model is not trained, so that flags of training have any valid value.
_PRESET = {
    "num_rollout": 0,
    "debug_rollout_only": True,
    "rollout_batch_size": 1,
    "advantage_estimator": "reinforce_plus_plus",
    "normalize_advantages": True,
}


def evaluate(words: list[str]) -> int:
    """Evaluate a model on data files, tasks (reasoning-gym:NAME), or environments (file.py:Class).

    The model is --hf-checkpoint DIR, or --base-url URL with any OpenAI endpoint. Other flags are those of
    `furlong train`: --rm-type, --custom-rm-path, --label-key, --eval-temperature, --eval-max-response-len, --max-turns.
    """
    targets = [*itertools.takewhile(lambda word: not word.startswith("-"), words)]
    options, flags = _parser().parse_known_args(words[len(targets) :])
    _check(options, len(targets))
    results = [_evaluate(target, options, flags) for target in targets or [None]]
    summaries = [summary for each in results for summary in each]
    if options.json:
        show(json.dumps({"sets": [summary.as_dict() for summary in summaries]}, indent=1))
        return 0
    from furlong.evals.eval_summary import table

    show(table(summaries))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("eval", evaluate.__doc__)
    parser.usage = "furlong eval [TARGET ...] (--hf-checkpoint DIR | --base-url URL) [options] [flags of furlong train]"
    parser.add_argument("--base-url", metavar="URL", help="chat endpoint, such as http://127.0.0.1:30000/v1")
    parser.add_argument("--model", default="default", help="name of the model at the endpoint (default: default)")
    parser.add_argument(
        "--api-key-env", default=KEY_VARIABLE, metavar="NAME", help=f"variable with the key (default: {KEY_VARIABLE})"
    )
    parser.add_argument("--extra-body", default="{}", metavar="JSON", help="fields added to each request")
    parser.add_argument("-n", "--num-tasks", type=int, metavar="N", help="tasks of each set (default: all)")
    parser.add_argument("-k", "--samples", type=int, default=1, metavar="K", help="samples of each task (default: 1)")
    parser.add_argument("--seed", type=int, default=42, help="seed of samples and episodes (default: 42)")
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="tasks at one time (default: 32)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="records, JSONL (default: evals/NAME.jsonl)")
    parser.add_argument("--resume", action="store_true", help="continue the evaluation in --output")
    return parser


def _check(options: argparse.Namespace, num_targets: int) -> None:
    problems = [
        f"{flag} is {value}; give a whole number of at least 1"
        for flag, value in (
            ("--num-tasks", options.num_tasks), ("--samples", options.samples), ("--concurrency", options.concurrency)
        )
        if value is not None and value < 1
    ]  # fmt: skip
    if num_targets > 1 and options.output is not None:
        problems.append(f"--output {options.output} is one file, but there are {num_targets} sets; leave it out")
    if options.base_url is not None and not re.match(r"https?://", options.base_url):
        problems.append(f"--base-url {options.base_url} must begin with http:// or https://; it usually ends in /v1")
    if problems:
        raise ConfigError(*problems)


def _evaluate(target: str | None, options: argparse.Namespace, flags: list[str]) -> Sequence[Any]:
    from furlong.evals.eval_records import EvalFile
    from furlong.evals.evaluator import run_evaluation
    from furlong.wiring.rollout import build_evaluation

    endpoint = _endpoint(options)
    config, specs = _sets(target, options, flags, has_endpoint=endpoint is not None)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", specs[0].name).strip("-") or "eval"
    path = options.output or Path("evals") / f"{name}.jsonl"
    file = EvalFile(path, _header(config, specs, options), resume=options.resume)
    built = build_evaluation(config, specs, endpoint)
    summaries = asyncio.run(
        run_evaluation(built, file, num_tasks=options.num_tasks, concurrency=options.concurrency, progress=_progress)
    )
    print(f"furlong eval: records in {path}", file=sys.stderr)
    return summaries


def _sets(
    target: str | None, options: argparse.Namespace, flags: list[str], *, has_endpoint: bool
) -> tuple[Config, list[EvalSpec]]:
    from furlong.catalogue import NO_EFFECT
    from furlong.config.command_line import examine
    from furlong.config.environment_specs import parse_environments
    from furlong.config.evaluation import eval_specs
    from furlong.config.sections.rollout import set_name

    words = list(flags)
    is_environment = target is not None and not _is_data(target)
    if is_environment:
        words += ["--environment", str(target)]
    preset = {**_PRESET, "n_samples_per_eval_prompt": options.samples, "rollout_seed": options.seed}
    preset["max_concurrent_episodes"] = None
    resolved, problems = examine(words, preset=preset)
    config = resolved.config
    data = target if target is not None and not is_environment else config.data.prompt_data
    named = parse_environments(config.session.environment)
    if data is None and named:
        data = named[0].prompt_data or f"episodes:{options.num_tasks or DEFAULT_TASKS}"
    if data is None and not (config.eval.eval_prompt_data or config.eval.eval_config):
        raise ConfigError(
            *(each for each in problems if each.row == NO_EFFECT or "unexpected word" in each),  # such as unknown flags
            "there is nothing to evaluate; name a data file, a task or an environment, such as `furlong eval "
            "problems.jsonl --hf-checkpoint MODEL --rm-type math`",
        )
    if data is not None:
        name = named[0].name if named else set_name(data)
        resolved, problems = examine([*words, "--eval-prompt-data", name, data], preset=preset)
    ignored = "--hf-checkpoint is missing" if has_endpoint else "\0"
    if problems := [problem for problem in problems if not problem.startswith(ignored)]:
        raise ConfigError(*problems)
    return resolved.config, eval_specs(resolved.config)


def _is_data(target: str) -> bool:
    from furlong.config.hub import hub_name
    from furlong.config.task_specs import is_task

    file = target.partition("@[")[0]
    is_elsewhere = is_task(target) or hub_name(target, "dataset") is not None
    return is_elsewhere or os.path.exists(file) or Path(file.partition("?")[0]).suffix in (".jsonl", ".parquet")


def _endpoint(options: argparse.Namespace) -> EndpointOptions | None:
    from furlong.wiring.rollout import EndpointOptions

    if options.base_url is None:
        return None
    extra = json_option("--extra-body", options.extra_body, "'{\"key\": value}'")
    return EndpointOptions(options.base_url, options.model, os.environ.get(options.api_key_env), extra)


def _header(config: Config, specs: Sequence[EvalSpec], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": f"{options.base_url} {options.model}" if options.base_url else config.rollout.hf_checkpoint,
        "sets": [[spec.name, spec.path] for spec in specs],
        "environment": list(config.session.environment),
        "samples": specs[0].config.eval.n_samples_per_eval_prompt,
        "seed": options.seed,
        "temperature": specs[0].config.rollout.rollout_temperature,
        "max_response_len": specs[0].config.rollout.rollout_max_response_len,
    }


def _progress(name: str, done: int, total: int) -> None:
    if done in (0, total) or done * SHOWN_EVERY // total != (done - 1) * SHOWN_EVERY // total:
        print(f"furlong eval: {name} {done}/{total} tasks", file=sys.stderr)
