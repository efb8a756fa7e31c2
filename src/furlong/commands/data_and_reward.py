"""Commands that read the data of a run: `furlong data` checks or tokenizes it, `furlong reward` scores rows of it."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.commands.output import Report, command_parser, subcommand
from furlong.errors import ConfigError

if TYPE_CHECKING:
    from furlong.config.sections import Config
    from furlong.data.prompt import Prompt
    from furlong.diagnosis.preflight.context import PromptFile

SHOWN_ROWS = 20
BINS = 10
BAR = 40


def data(words: list[str]) -> int:
    """Check every row of the files that a run reads, or write its prompts as tokens.

    Accepts the flags of `furlong train`; --hf-checkpoint and --prompt-data are required, and flags of columns, chat
    template and length limits apply.
    """
    parser = command_parser("data", data.__doc__, has_json=False)
    commands = parser.add_subparsers(dest="command", required=True)
    subcommand(commands, "check", "report bad rows and lengths; exit code 1 on a problem", data.__doc__)
    tokenize = subcommand(commands, "tokenize", "write a Parquet file of tokens for --prompt-data", data.__doc__)
    tokenize.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="output file, .parquet")
    options, flags = parser.parse_known_args(words)
    config, report = _config(flags), Report(as_json=options.json)
    return _check(config, report) if options.command == "check" else _tokenize(config, options.output, report)


def _config(flags: Sequence[str]) -> Config:
    from furlong.config.checks.value_checks import model_problem, prompt_file_problem
    from furlong.config.evaluation import eval_specs

    if flags and not flags[0].startswith("-"):
        raise ConfigError(f"unexpected word {flags[0]}; write --prompt-data {flags[0]}, and --hf-checkpoint DIR")
    config = _parsed(flags)
    problems: list[str | None] = []
    if config.rollout.hf_checkpoint is None:
        problems.append("--hf-checkpoint is missing: its tokenizer renders and counts the rows; give a model directory")
    else:
        problems.append(model_problem("--hf-checkpoint", config.rollout.hf_checkpoint))
    if config.data.prompt_data is None:
        problems.append("--prompt-data is missing: there are no rows to read; give a .jsonl or .parquet file")
    else:
        problems.append(prompt_file_problem("--prompt-data", config.data.prompt_data))
    problems += [prompt_file_problem(f"evaluation set {spec.name}", spec.path) for spec in eval_specs(config)]
    if errors := [problem for problem in problems if problem]:
        raise ConfigError(*errors)
    return config


def _parsed(flags: Sequence[str]) -> Config:
    from furlong.config.command_line import parse, with_local_copies

    resolved, problems = with_local_copies(parse(flags), weights=False)
    if problems:
        raise ConfigError(*problems)
    return resolved.config


def _check(config: Config, report: Report) -> int:
    from furlong.catalogue import most_severe_first
    from furlong.diagnosis.preflight import data_checks, model_checks
    from furlong.diagnosis.preflight.context import PreflightContext

    context = PreflightContext(config, reads_all=True)
    checks = (
        data_checks.files,
        data_checks.rows,
        data_checks.lengths,
        model_checks.no_template,
        model_checks.templated_twice,
    )
    if context.tokenizer is None:  # then rows cannot be counted; weights are not needed
        checks = (model_checks.model_folder, *checks)
    findings = most_severe_first([finding for check in checks for finding in check(context)])
    for file in context.files:
        report.text(*_lines(file))
    report.findings(findings, well="every row is a prompt within the limits")
    return report.end(files=[_record(file) for file in context.files])


def _record(file: PromptFile) -> dict[str, Any]:
    rows = file.rows
    refused = [] if rows is None else rows.refused
    return {
        "name": file.name,
        "path": file.path,
        "problem": file.problem,
        "num_rows": 0 if rows is None else rows.num_rows,
        "num_prompts": 0 if rows is None else len(rows.prompts),
        "refused": [{"where": r.where, "reason": r.reason, "kind": r.kind} for r in refused],
        "lengths": _histogram(file),
    }


def _lines(file: PromptFile) -> list[str]:
    if file.rows is None:
        return [f"{file.name} {file.path}: cannot be read"]
    bad = [refused for refused in file.rows.refused if refused.num_tokens is None]
    lines = [f"{file.name} {file.path}: {file.rows.num_rows} rows, {len(file.rows.prompts)} prompts, {len(bad)} bad"]
    lines += [f"  {refused.where}: {refused.reason}" for refused in bad[:SHOWN_ROWS]]
    if len(bad) > SHOWN_ROWS:
        lines.append(f"  and {len(bad) - SHOWN_ROWS} more")
    if histogram := _histogram(file):
        lines.append("  tokens per prompt")
        most = max(row["count"] for row in histogram)
        lines += [
            f"  {row['from']:>7} to {row['to']:<7} {row['count']:>8} {'#' * round(BAR * row['count'] / most)}".rstrip()
            for row in histogram
        ]
    return lines


def _histogram(file: PromptFile) -> list[dict[str, int]]:
    if file.rows is None:
        return []
    lengths = [len(prompt.tokens) for prompt in file.rows.prompts]
    lengths += [refused.num_tokens for refused in file.rows.refused if refused.num_tokens is not None]
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // BINS))
    starts = range(low, high + 1, width)
    counts = [0] * len(starts)
    for length in lengths:
        counts[(length - low) // width] += 1
    return [{"from": a, "to": a + width - 1, "count": n} for a, n in zip(starts, counts, strict=True)]


def _tokenize(config: Config, output: Path, report: Report) -> int:
    from furlong.data.dataset import open_reader
    from furlong.data.prompt import PromptFormat
    from furlong.data.prompt_path import PromptDataPath
    from furlong.data.tokenized import write_tokenized
    from furlong.wiring.context import read_tokenizer

    if output.suffix != ".parquet":
        raise ConfigError(f"--output {output}: tokens are written as Parquet; use a name that ends in .parquet")
    location = PromptDataPath.parse(str(config.data.prompt_data))
    if location.path.resolve() == output.resolve():
        raise ConfigError(f"--output {output} is also the input file; choose another file")
    prompt_format = PromptFormat.of(config)
    started = time.perf_counter()
    written = write_tokenized(
        location,
        open_reader(location, prompt_format),
        output,
        tokenizer=read_tokenizer(Path(str(config.rollout.hf_checkpoint)), config.data.chat_template_path),
        prompt_format=prompt_format,
        num_workers=config.data.num_data_workers,
        skip_bad_rows=config.fault.skip_bad_rows,
    )
    seconds = time.perf_counter() - started
    bad = f", {written.num_bad} bad rows skipped, the first: {written.first_refused}" if written.num_bad else ""
    report.text(
        f"{output}: {written.num_prompts} prompts, {written.num_tokens} tokens in {seconds:.1f} s{bad}; "
        "use it as --prompt-data with the same flags"
    )
    return report.end(file=str(output), num_prompts=written.num_prompts, num_bad=written.num_bad)


def reward(words: list[str]) -> int:
    """Call a reward on rows of the data; exit code 1 if a call fails or correct answers do not score higher.

    Accepts the flags of `furlong train`: --rm-type or --custom-rm-path, --prompt-data, --input-key, --label-key,
    --reward-key, --reward-timeout; with --hf-checkpoint, samples have tokens.
    """
    parser = command_parser("reward", reward.__doc__, has_json=False)
    test = subcommand(parser.add_subparsers(dest="command", required=True), "test", "call the reward", reward.__doc__)
    test.add_argument("--response", metavar="TEXT", help="response to score; {label} is replaced by the label")
    test.add_argument("--rows", type=int, default=3, metavar="N", help="number of rows (default: 3)")
    return _test_reward(*parser.parse_known_args(words))


def _test_reward(options: argparse.Namespace, flags: list[str]) -> int:
    from furlong.config.args_view import Args
    from furlong.rewards.group_reward import GroupReward
    from furlong.tools.reward_test import call_reward, reward_findings

    config = _parsed(flags)
    if config.reward.rm_type is None and config.reward.custom_rm_path is None:
        raise ConfigError("no reward to test; give --rm-type or --custom-rm-path")
    if config.data.prompt_data is None:
        raise ConfigError("--prompt-data is missing: there are no rows to score; give a .jsonl or .parquet file")
    if config.data.label_key is None and options.response is None:
        raise ConfigError("--label-key is missing: there is no correct answer to score; give it, or --response TEXT")
    tokenizer = None
    if config.rollout.hf_checkpoint is not None:
        from furlong.wiring.context import read_tokenizer

        tokenizer = read_tokenizer(Path(config.rollout.hf_checkpoint), config.data.chat_template_path)
    reward, rows = config.reward, _rows(config, config.data.prompt_data, max(1, options.rows), tokenizer)
    scorer = GroupReward(
        rm_type=reward.rm_type,
        rm_url=reward.rm_url,
        custom_rm=reward.custom_rm_path,
        group_rm=reward.group_rm,
        timeout_s=config.fault.reward_timeout,
        num_workers=1,
        memory_limit_bytes=reward.memory_limit_bytes,
        args=Args(config),
    )
    name = f"--rm-type {reward.rm_type}" if reward.rm_type else f"--custom-rm-path {reward.custom_rm_path}"
    calls = asyncio.run(
        call_reward(scorer, rows, rm_type=reward.rm_type, response=options.response, tokenizer=tokenizer)
    )
    report = Report(as_json=options.json)
    report.text(*(call.text() for call in calls))
    findings = reward_findings(calls, name=name, reward_key=reward.reward_key)
    report.findings(findings, well=f"{name} scored {len(calls)} responses to {len(rows)} rows")
    return report.end(calls=[call.record() for call in calls])


def _rows(config: Config, path: str, count: int, tokenizer: Any) -> list[Prompt]:
    from furlong.data.dataset import open_prompts
    from furlong.data.prompt import PromptFormat

    prompt_format = dataclasses.replace(
        PromptFormat.of(config), apply_chat_template=False, keep_messages=True, max_prompt_len=None
    )
    prompts = open_prompts(path, tokenizer=None, prompt_format=prompt_format, streaming=True, skip_bad_rows=True)
    prompts.begin(None)
    rows = prompts.take(count)
    prompts.close()
    for prompt in rows:
        if tokenizer is not None and isinstance(prompt.text, str):
            prompt.tokens = list(tokenizer.encode(prompt.text, add_special_tokens=False))
    return rows
