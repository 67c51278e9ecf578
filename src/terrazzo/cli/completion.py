"""``terrazzo completion``: a script that teaches a shell to complete commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from terrazzo.cli.grammar import FILES, FOLDERS, SCRIPTS, WORDS, Command, Option, Values, grammar

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """\
examples:
  eval "$(terrazzo completion bash)"
      complete in this bash, until it is closed
  terrazzo completion bash > ~/.local/share/bash-completion/completions/terrazzo
      complete in every new bash (needs the package bash-completion; make the folder first)
  terrazzo completion zsh > ~/.zfunc/_terrazzo
      complete in every new zsh, if ~/.zshrc says: fpath+=~/.zfunc; autoload -Uz compinit; compinit
  terrazzo completion fish > ~/.config/fish/completions/terrazzo.fish
      complete in every new fish
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands in your shell",
        description="Print a script that teaches a shell to complete commands, options and files.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=sorted(SCRIPT_OF), help="the shell you use")
    parser.set_defaults(command=completion)


def completion(options: argparse.Namespace) -> int:
    from terrazzo.cli.main import parser  # it imports this module

    print(SCRIPT_OF[options.shell](grammar(parser())), end="")
    return 0


def quoted(text: str) -> str:
    """A word in single quotes, as every shell here reads it."""
    return "'" + text.replace("'", "'\\''") + "'"


# ---- bash -----------------------------------------------------------------------------------

BASH = """\
# Completion of terrazzo for bash.
_terrazzo() {
    local current=${COMP_WORDS[COMP_CWORD]} at='' wants='' place=0 word before='' i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        # bash takes net.py:build and --on=3 for three words each
        if [[ $word == : || $before == : || $word == '=' ]]; then before=$word; continue; fi
        before=$word
        if [[ $wants ]]; then wants=''; continue; fi
        case "$at $word" in
@STATES@
            *' -'*) ;;
            *) place=$((place + 1)) ;;
        esac
        case "$at $place" in
@PASSED_ON@
        esac
    done
    [[ $before == : && $current != : ]] && return
    [[ $current == '=' ]] && current=''
    [[ $wants ]] || case "$at $current" in
@OPTIONS@
    esac
    [[ $wants ]] || case "$at $place" in
@PLACES@
    esac
    case $wants in
        words*) COMPREPLY=($(compgen -W "${wants#words }" -- "$current")) ;;
        files) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
        folders) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
        scripts)
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -f -X '!*.py' -- "$current"; compgen -d -- "$current")
            ;;
    esac
    [[ ${COMPREPLY[0]} == *: ]] && compopt -o nospace
    return 0
}
complete -F _terrazzo terrazzo
"""


def bash(top: Command) -> str:
    states, passed_on, options, places = [], [], [], []
    for command in top.walk():
        at = " ".join(command.path)
        for below in command.commands:
            name = below.path[-1]
            states.append(
                f"{quoted(f'{at} {name}')}) at={quoted(' '.join(below.path))}; place=0 ;;"
            )
        for option in command.options:
            if option.values is not None:
                spelled = "|".join(quoted(f"{at} {flag}") for flag in option.flags)
                states.append(f"{spelled}) wants={quoted(_bash_values(option.values))} ;;")
        flags = " ".join(flag for option in command.options for flag in option.flags)
        options.append(f"{quoted(f'{at} -')}*) wants={quoted(f'words {flags}')} ;;")
        if command.passes_on:
            last = quoted(f"{at} {len(command.places)}")
            passed_on.append(f"{last}) wants=files; break ;;")
        for place, values in enumerate(_places(command)):
            places.append(f"{quoted(f'{at} {place}')}) wants={quoted(_bash_values(values))} ;;")
    return _filled(
        BASH,
        STATES=(3, states), PASSED_ON=(3, passed_on), OPTIONS=(2, options), PLACES=(2, places),
    )  # fmt: skip


def _places(command: Command) -> tuple[Values, ...]:
    """What may stand at each place; the names of commands are the first."""
    names = tuple(below.path[-1] for below in command.commands)
    return (Values(WORDS, names),) if names else command.places


def _bash_values(values: Values) -> str:
    return f"words {' '.join(values.words)}" if values.kind == WORDS else values.kind


def _filled(script: str, **parts: tuple[int, Iterable[str]]) -> str:
    """The script with lines in place of each @NAME@, indented by so many levels."""
    for name, (level, lines) in parts.items():
        block = "\n".join("    " * level + line for line in lines)
        script = script.replace(f"@{name}@", block)
    return script


# ---- zsh ------------------------------------------------------------------------------------

ZSH_KINDS = {FILES: "_files", FOLDERS: "_files -/", SCRIPTS: '_files -g "*.py"'}
ZSH_END = """\
if [[ $funcstack[1] == _terrazzo ]]; then
    _terrazzo "$@"
else
    compdef _terrazzo terrazzo
fi
"""


def zsh(top: Command) -> str:
    functions = [_zsh_function(command) for command in top.walk()]
    return "#compdef terrazzo\n# Completion of terrazzo for zsh.\n" + "".join(functions) + ZSH_END


def _zsh_function(command: Command) -> str:
    """One function per command; one with commands below hands on to theirs."""
    lines = [spec for option in command.options for spec in _zsh_option(option)]
    if command.commands:
        lines += ["'1: :->command'", "'*:: :->below'"]
    else:
        lines += [f"{place}: :{_zsh_values(v)}" for place, v in enumerate(command.places, start=1)]
        lines = [line if line.startswith("'") else quoted(line) for line in lines]
        lines += ["'*: :_files'"] if command.passes_on else []
    text = f"{_zsh_name(command)}() {{\n    local state line\n    _arguments -C -S"
    text += "".join(f" \\\n        {line}" for line in lines) + "\n"
    if command.commands:
        text += _zsh_dispatch(command)
    return text + "}\n"


def _zsh_dispatch(command: Command) -> str:
    described = [
        quoted(f"{below.path[-1]}:{below.help}".replace("\n", " ")) for below in command.commands
    ]
    cases = [f"{below.path[-1]}) {_zsh_name(below)} ;;" for below in command.commands]
    return "\n".join(
        [
            "    case $state in",
            "        command)",
            f"            local commands=({' '.join(described)})",
            "            _describe command commands",
            "            ;;",
            "        below)",
            "            case $words[1] in",
            *(f"                {case}" for case in cases),
            "            esac",
            "            ;;",
            "    esac\n",
        ]
    )


def _zsh_name(command: Command) -> str:
    return "_".join(("_terrazzo", *command.path))


def _zsh_option(option: Option) -> list[str]:
    about = option.help.replace("[", "(").replace("]", ")")
    value = "" if option.values is None else f": :{_zsh_values(option.values)}"
    equals = "=" if option.values is not None else ""
    return [
        quoted(f"*{flag}{equals if flag.startswith('--') else ''}[{about}]{value}")
        for flag in option.flags
    ]


def _zsh_values(values: Values) -> str:
    if values.kind == WORDS:
        words = " ".join(word.replace(":", "\\:") for word in values.words)
        return f"({words})"
    return ZSH_KINDS.get(values.kind, " ")


# ---- fish -----------------------------------------------------------------------------------


def fish(top: Command) -> str:
    lines = ["# Completion of terrazzo for fish.", "complete -c terrazzo -f"]
    for command in top.walk():
        inside = [f"__fish_seen_subcommand_from {name}" for name in command.path]
        names = " ".join(below.path[-1] for below in command.commands)
        here = [*inside, f"not __fish_seen_subcommand_from {names}"] if names else inside
        condition = quoted("; and ".join(here))
        lines += [
            f"complete -c terrazzo -n {condition} -a {below.path[-1]} -d {quoted(below.help)}"
            for below in command.commands
        ]
        lines += [_fish_option(option, condition) for option in command.options]
        if any(place.kind in ZSH_KINDS for place in command.places) or command.passes_on:
            lines.append(f"complete -c terrazzo -n {condition} -F")
        words = [word for place in command.places for word in place.words]
        if words:
            lines.append(f"complete -c terrazzo -n {condition} -a {quoted(' '.join(words))}")
    return "\n".join(lines) + "\n"


def _fish_option(option: Option, condition: str) -> str:
    spelled = [
        f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags
    ]
    value = ""
    if option.values is not None:
        value = " -r -F" if option.values.kind in ZSH_KINDS else " -x"
        if option.values.words:
            value += f" -a {quoted(' '.join(option.values.words))}"
    about = quoted(option.help)
    return f"complete -c terrazzo -n {condition} {' '.join(spelled)}{value} -d {about}"


SCRIPT_OF: dict[str, Callable[[Command], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
