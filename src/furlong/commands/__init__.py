"""The commands of `furlong`: a table, and one module per command or group of commands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: its summary, and the module and name of the function that runs it."""

    summary: str
    target: str


GROUPS: dict[str, dict[str, Command]] = {
    "train": {
        "quickstart": Command("teach a tiny model arithmetic in a minute or two", "furlong.quickstart.quickstart:main"),
        "reproduce": Command(
            "run a row of the results page and compare with it", "furlong.commands.reproduce:reproduce"
        ),
        "train": Command("train a model: `furlong train --help` lists the flags", "furlong.cli:train"),
    },
    "check before a run": {
        "doctor": Command("check a launch command without starting it", "furlong.commands.doctor:doctor"),
        "plan": Command("predict the GPU memory of each phase", "furlong.commands.plan:plan"),
        "data": Command(
            "check every row of the data, or tokenize it to a file", "furlong.commands.data_and_reward:data"
        ),
        "reward": Command("test a reward function on rows of the data", "furlong.commands.data_and_reward:reward"),
        "template": Command("test a chat template over several turns", "furlong.commands.template:template"),
        "check": Command(
            "check the files and values of a model or checkpoint", "furlong.commands.weight_folders:check"
        ),
        "env": Command("compare installed versions with the tested ones", "furlong.commands.doctor:env"),
    },
    "inspect a run": {
        "view": Command("show runs on a local web page, or write it to a file", "furlong.commands.view_run:view"),
        "doctor --run": Command("explain what is wrong with a run or why it failed", "furlong.commands.doctor:doctor"),
        "report": Command("summarize runs and audit their prompt groups", "furlong.commands.inspect_run:report"),
        "diff": Command("find the first value in which two runs differ", "furlong.commands.inspect_run:diff"),
        "bundle": Command("save one step to a small file, without text", "furlong.commands.inspect_run:bundle"),
        "replay": Command("train the step of a bundle again and compare", "furlong.commands.inspect_run:replay"),
    },
    "shell": {
        "completion": Command(
            "print a script for tab completion in bash or zsh", "furlong.commands.completion:completion"
        ),
    },
    "models": {
        "eval": Command(
            "evaluate a model on data, tasks and environments",
            "furlong.commands.evaluate:evaluate",
        ),
        "serve": Command("serve a model with SGLang's and OpenAI's APIs", "furlong.commands.serve:serve"),
        "convert": Command(
            "convert between Hugging Face and Megatron-LM formats", "furlong.commands.weight_folders:convert"
        ),
    },
}
COMMANDS = {name: row for rows in GROUPS.values() for name, row in rows.items() if " " not in name}
