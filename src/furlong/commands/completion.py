"""`furlong completion bash|zsh`: a script that completes commands, flags and their values in a shell."""

from __future__ import annotations

from furlong.commands.output import command_parser, show

FLAG_COMMANDS = ("train", "doctor", "plan", "eval", "data", "reward")  # that accept flags of training

SCRIPT = """{head}_furlong() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} before=""
  COMPREPLY=()
  case "$COMP_CWORD ${{COMP_WORDS[1]}}" in
    "1 "*) COMPREPLY=($(compgen -W "{commands}" -- "$current")); return ;;
{subcommands}
  esac
  case "$previous$current" in
    --*=) previous=${{previous%=}}; current="" ;;
    =*) previous=${{COMP_WORDS[COMP_CWORD-2]}} ;;
  esac
  case "$current" in
    --*=*) previous=${{current%%=*}}; before="$previous="; current=${{current#*=}} ;;
  esac
  case "${{COMP_WORDS[1]}} $current" in
    {flag_commands}) COMPREPLY=($(compgen -W "{flags}" -- "$current")); return ;;
  esac
  case "$previous" in
{values}
  esac
}}
{register}"""
SUBCOMMANDS = {"data": "check tokenize", "reward": "test", "template": "check list show", "completion": "bash zsh"}
BASH = "complete -o default -F _furlong furlong\n"
ZSH = "autoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n"
ZSH_REGISTER = """_furlong_zsh() {
  _bash_complete -o default -F _furlong || { compset -P '--*=' && _files; }
}
compdef _furlong_zsh furlong
"""  # a flag and its value are one word here


def completion(words: list[str]) -> int:
    """Print a script for tab completion in bash or zsh.

    Put `eval "$(furlong completion bash)"` into ~/.bashrc, or the same with zsh into ~/.zshrc.
    """
    parser = command_parser("completion", completion.__doc__, has_json=False)
    parser.add_argument("shell", choices=["bash", "zsh"])
    show(script(parser.parse_args(words).shell))
    return 0


def script(shell: str) -> str:
    """Return the script for "bash" or "zsh". Without a value to choose from, the shell completes files."""
    from furlong.commands import COMMANDS
    from furlong.config.checks.value_checks import RM_TYPES
    from furlong.config.flag_spec import flag_specs
    from furlong.config.help import FILE_FLAGS
    from furlong.config.sections import Config

    specs = flag_specs(Config).values()
    flags = [spec.flag for spec in specs] + [
        spec.flag.replace("--", "--no-", 1) for spec in specs if spec.kind == "tristate"
    ]
    choices = {spec.flag: spec.choices for spec in specs if spec.choices} | {"--rm-type": RM_TYPES}
    values = [
        f'    {flag}) COMPREPLY=($(compgen -P "$before" -W "{" ".join(words)}" -- "$current")) ;;'
        for flag, words in choices.items()
    ]
    return SCRIPT.format(
        head=ZSH if shell == "zsh" else "",
        register=ZSH_REGISTER if shell == "zsh" else BASH,
        commands=" ".join(COMMANDS),
        flag_commands=" | ".join(f'"{name} "-*' for name in FLAG_COMMANDS),
        flags=" ".join([*flags, *FILE_FLAGS, "--help"]),
        subcommands="\n".join(
            f'    "2 {name}") COMPREPLY=($(compgen -W "{words}" -- "$current")); return ;;'
            for name, words in SUBCOMMANDS.items()
        ),
        values="\n".join(values),
    )
