"""`hf-xmc completion`: completes commands, options and values in a shell."""

from __future__ import annotations

import argparse

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
    from .train import make_parser as make_train_parser  # imports torch and transformers

    options, values = [], []
    for command in COMMANDS:
        parser = make_train_parser() if command == "train" else make_parser(command)
        names = [name for action in parser._actions for name in action.option_strings if "_" not in name]
        options.append(f'            {command}) words="{" ".join(names)}" ;;')
        for action in parser._actions:
            if action.choices is not None and action.option_strings:
                flags = "|".join(f'"{command} {name}"' for name in action.option_strings)
                values.append(f'            {flags}) words="{" ".join(map(str, action.choices))}" ;;')
    script = _SCRIPT.format(commands=" ".join(COMMANDS), options="\n".join(options), values="\n".join(values))
    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(script, end="")
