"""`furlong reward test`: test a reward function on rows of the data."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from furlong.commands.output import findings_code, show, show_findings, show_json
from furlong.errors import ConfigError

if TYPE_CHECKING:
    from furlong.config import Config
    from furlong.data.prompt import Prompt


def main(words: list[str]) -> int:
    """Call a reward on rows of the data; exit code 1 if a call fails or correct answers do not score higher.

    Accepts the flags of `furlong train`: --rm-type or --custom-rm-path, --prompt-data, --input-key, --label-key,
    --reward-key, --reward-timeout; with --hf-checkpoint, samples have tokens.
    """
    parser = argparse.ArgumentParser(prog="furlong reward", allow_abbrev=False, description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    test = commands.add_parser("test", help="call the reward", allow_abbrev=False, description=main.__doc__)
    test.add_argument("--response", metavar="TEXT", help="response to score; {label} is replaced by the label")
    test.add_argument("--rows", type=int, default=3, metavar="N", help="number of rows (default: 3)")
    test.add_argument("--json", action="store_true", help="print JSON")
    options, flags = parser.parse_known_args(words)
    return _test(options, flags)


def _test(options: argparse.Namespace, flags: list[str]) -> int:
    from furlong.config.args_view import Args
    from furlong.config.command_line import parse
    from furlong.rewards.group_reward import GroupReward
    from furlong.tools.reward_test import call_reward, reward_findings

    config = parse(flags).config
    _check(config, has_response=options.response is not None)
    reward, tokenizer = config.reward, _tokenizer(config)
    rows = _rows(config, max(1, options.rows), tokenizer)
    scorer = GroupReward(
        rm_type=reward.rm_type,
        rm_url=reward.rm_url,
        custom_rm=reward.custom_rm_path,
        group_rm=reward.group_rm,
        timeout_s=config.fault.reward_timeout,
        num_workers=1,
        args=Args(config),
    )
    name = f"--rm-type {reward.rm_type}" if reward.rm_type else f"--custom-rm-path {reward.custom_rm_path}"
    calls = asyncio.run(
        call_reward(scorer, rows, rm_type=reward.rm_type, response=options.response, tokenizer=tokenizer)
    )
    findings = reward_findings(calls, name=name, reward_key=reward.reward_key)
    if options.json:
        show_json(findings, calls=[call.record() for call in calls])
    else:
        show("\n".join(call.text() for call in calls))
        show_findings(findings, well=f"{name} scored {len(calls)} responses to {len(rows)} rows")
    return findings_code(findings)


def _check(config: Config, *, has_response: bool) -> None:
    """Raise ConfigError if there is no reward, no data, or nothing to score."""
    if config.reward.rm_type is None and config.reward.custom_rm_path is None:
        raise ConfigError("no reward to test; give --rm-type or --custom-rm-path")
    if config.data.prompt_data is None:
        raise ConfigError("--prompt-data is missing: there are no rows to score; give a .jsonl or .parquet file")
    if config.data.label_key is None and not has_response:
        raise ConfigError("--label-key is missing: there is no correct answer to score; give it, or --response TEXT")


def _tokenizer(config: Config) -> Any:
    """Load the tokenizer of --hf-checkpoint; None without that flag."""
    if config.rollout.hf_checkpoint is None:
        return None
    from furlong.models.tokenizer import load_tokenizer

    return load_tokenizer(config.rollout.hf_checkpoint)


def _rows(config: Config, count: int, tokenizer: Any) -> list[Prompt]:
    """Read the first rows of --prompt-data, as rewards receive them."""
    from furlong.data.dataset import open_prompts
    from furlong.data.prompt import PromptFormat

    assert config.data.prompt_data is not None  # checked by `_check`
    prompt_format = dataclasses.replace(
        PromptFormat.of_training(config), apply_chat_template=False, keep_messages=True, max_prompt_len=None
    )
    prompts = open_prompts(
        config.data.prompt_data, tokenizer=None, prompt_format=prompt_format, streaming=True, skip_bad_rows=True
    )
    prompts.begin(None)
    rows = prompts.take(count)
    prompts.close()
    for prompt in rows:
        if tokenizer is not None and isinstance(prompt.text, str):
            prompt.tokens = list(tokenizer.encode(prompt.text, add_special_tokens=False))
    return rows
