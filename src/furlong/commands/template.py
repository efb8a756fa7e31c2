"""`furlong template`: check whether a chat template supports multi-turn training."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from furlong.commands.output import Report, command_parser, json_option, show, subcommand
from furlong.errors import DataError

PROMPTS_READ = 256


def template(words: list[str]) -> int:
    """Check, list or print chat templates; exit code 1 if `check` finds a problem."""
    parser = command_parser("template", template.__doc__, has_json=False)
    commands = parser.add_subparsers(dest="command", required=True)
    does = "render scripted conversations and check every turn"
    check = subcommand(commands, "check", does, f"{does.capitalize()}; exit code 1 on a problem.")
    check.add_argument("--hf-checkpoint", required=True, metavar="DIR", help="directory of the tokenizer")
    check.add_argument("--template", metavar="FILE|NAME", help="template to check (default: the tokenizer's)")
    check.add_argument(
        "--thinking", choices=["on", "off", "both"], default="both", help="values of enable_thinking (default: both)"
    )
    check.add_argument("--chat-template-kwargs", default="{}", metavar="JSON", help="keyword arguments of the template")
    check.add_argument("--rollout-stop-token-ids", nargs="+", type=int, default=[], metavar="N", help="as in training")
    check.add_argument("--rollout-stop", nargs="+", default=[], metavar="TEXT", help="as in training")
    check.add_argument("--prompt-data", metavar="FILE", help="prompts, to detect ones that are already rendered")
    check.add_argument("--input-key", default="input", metavar="KEY", help="column of the prompt (default: input)")
    subcommand(commands, "list", "list the templates that ship with furlong")
    shown = commands.add_parser("show", help="print a shipped template")
    shown.add_argument("name", metavar="NAME")
    options = parser.parse_args(words)
    match options.command:
        case "check":
            return _check(options)
        case "list":
            from furlong.models.tokenizer import SHIPPED

            rows, report = {name: template.family for name, template in SHIPPED.items()}, Report(as_json=options.json)
            report.record(rows)
            report.text(*(f"{name:30}{family}" for name, family in rows.items()))
            return 0
        case _:
            from furlong.models.tokenizer import read_template

            show(read_template(options.name, "furlong template show"))
            return 0


def _check(options: argparse.Namespace) -> int:
    from furlong.config.hub import resolve_model
    from furlong.core.chat_template import TEMPLATE_ERRORS
    from furlong.data.prompt import require_template
    from furlong.models.tokenizer import load_tokenizer, read_template
    from furlong.tools.template_test import (
        Template,
        prompt_findings,
        rewriting_findings,
        stop_findings,
        suggested_template,
    )

    folder = Path(resolve_model("--hf-checkpoint", options.hf_checkpoint, weights=False))
    tokenizer = load_tokenizer(folder)
    text = None if options.template is None else read_template(options.template, "--template")
    tokenizer.chat_template = text or tokenizer.chat_template
    require_template(tokenizer)
    name = f"the chat template of {folder}" if text is None else f"the chat template {options.template}"
    rendering = Template(
        tokenizer,
        text,
        json_option("--chat-template-kwargs", options.chat_template_kwargs, '{"enable_thinking": false}'),
    )
    trials = rendering.trials(("on", "off") if options.thinking == "both" else (options.thinking,))
    suggested = None
    if text is None and any(trial.rewriting for trial in trials):
        suggested = suggested_template(tokenizer)
    findings = rewriting_findings(trials, name=name, suggested=suggested)
    stops = {"stop_token_ids": options.rollout_stop_token_ids, "stop": options.rollout_stop}
    try:
        findings += stop_findings(tokenizer, folder, rendering, **stops)
    except TEMPLATE_ERRORS as error:
        problem = f"{name} cannot render a user message with its answer: {type(error).__name__}: {error}"
        raise DataError(f"{problem}; use another template (--chat-template-path)") from error
    if options.prompt_data is not None:
        findings += prompt_findings(_prompts(options), tokenizer, name=options.prompt_data)
    report = Report(as_json=options.json)
    for t in trials:
        report.text(f"{t.verdict:9} {t.conversation}, thinking {t.thinking}{': ' * bool(t.refused)}{t.refused}")
    report.findings(findings, well=f"{name} only appends, and its turns end where generation stops")
    return report.end(trials=[dataclasses.asdict(t) | {"verdict": t.verdict} for t in trials])


def _prompts(options: argparse.Namespace) -> list[Any]:
    from furlong.config.hub import resolve_data
    from furlong.data.dataset import open_prompts
    from furlong.data.prompt import PromptFormat

    prompt_format = PromptFormat(options.input_key, metadata_key=None, tool_key=None, keep_messages=True)
    path = resolve_data("--prompt-data", options.prompt_data)
    prompts = open_prompts(path, tokenizer=None, prompt_format=prompt_format, streaming=True)
    prompts.begin(None)
    return [prompt.text for prompt in prompts.take(PROMPTS_READ)]
