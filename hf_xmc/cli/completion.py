"""`hf-xmc completion`: completes commands, options and values in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from .parsers import COMMANDS, make_parser

_SCRIPT = """\
_hf_xmc() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $previous" in
{values}
        esac
        case "$current" in -*) case "${{COMP_WORDS[1]}}" in
{options}
        esac ;; esac
    fi
    # Without a word that fits, the shell completes names of files.
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hf_xmc hf-xmc
"""


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    from .train import TrainParser  # imports torch and transformers

    parsers = {command: TrainParser() if command == "train" else make_parser(command) for command in COMMANDS}
    if args.shell == "fish":
        print(_fish_script(parsers), end="")
        return
    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(_bash_script(parsers), end="")


def _flags(action: argparse.Action) -> list[str]:
    """The flags of an option, with dashes only."""
    return [name for name in action.option_strings if "_" not in name]


def _bash_script(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    options, values = [], []
    for command, parser in parsers.items():
        names = [name for action in parser._actions for name in _flags(action)]
        options.append(f'            {command}) words="{" ".join(names)}" ;;')
        for action in parser._actions:
            if action.choices is not None and action.option_strings:
                flags = "|".join(f'"{command} {name}"' for name in action.option_strings)
                values.append(f'            {flags}) words="{" ".join(map(str, action.choices))}" ;;')
    return _SCRIPT.format(commands=" ".join(COMMANDS), options="\n".join(options), values="\n".join(values))


def _fish_script(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    lines = [
        f"complete -c hf-xmc -f -n __fish_use_subcommand -a {name} -d '{what}'" for name, what in COMMANDS.items()
    ]
    for command, parser in parsers.items():
        condition = f"complete -c hf-xmc -n '__fish_seen_subcommand_from {command}'"
        for action in parser._actions:
            flags = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in _flags(action)]
            if not flags:
                continue
            if action.choices is not None:
                flags.append(f"-x -a '{' '.join(map(str, action.choices))}'")
            elif action.nargs != 0:
                flags.append("-r")  # takes a value, such as the name of a file
            text = (action.help or "").split(". ")[0].replace("%%", "%").replace("\\", "").replace("'", "")
            lines.append(f"{condition} {' '.join(flags)} -d '{' '.join(text.split())}'")
    return "\n".join(lines) + "\n"
