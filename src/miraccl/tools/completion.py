"""``miraccl completion``: scripts that complete the command line in bash, zsh and fish.

The shell runs ``miraccl`` with ``_MIRACCL_COMPLETE`` in the environment for every Tab; click finds
the parameter under the cursor, and the classes here exchange words with the shell. They replace
click's own classes, whose scripts cannot select files by suffix and do not split ``--option=value``
as bash does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import click
from click.core import ParameterSource
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    add_completion_class,
    split_arg_string,
)

from miraccl.types import Collective

#: read by click (``Command._main_shell_completion``)
VARIABLE = "_MIRACCL_COMPLETE"
#: kind of an item whose value is a suffix: the shell offers files with it, and folders
SUFFIX = "suffix"
_BASH = r"""
%(complete_func)s() {
    local kind value help current=${COMP_WORDS[COMP_CWORD]} words
    [[ $current == '=' ]] && current=''
    words=$(IFS=$'\n'; echo "${COMP_WORDS[*]}")
    COMPREPLY=()
    while IFS=$'\t' read -r kind value help; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            suffix)
                compopt -o filenames
                mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(
                    compgen -f -X "!*$value" -- "$current"; compgen -d -- "$current") ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(COMP_WORDS=$words COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete "$1")
}
complete -F %(complete_func)s %(prog_name)s
"""
_ZSH = r"""#compdef %(prog_name)s
%(complete_func)s() {
    local -a named described suffixes
    local kind value help
    while IFS=$'\t' read -r kind value help; do
        case $kind in
            dir) _files -/ ;;
            file) _files ;;
            suffix) suffixes+=("*$value") ;;
            plain)
                if [[ -n $help ]]; then described+=("${value//:/\\:}:$help")
                else named+=("$value"); fi ;;
        esac
    done < <(COMP_WORDS="${(pj:\n:)words}" COMP_CWORD=$((CURRENT-1)) \
             %(complete_var)s=zsh_complete "${words[1]}")
    [[ $PREFIX == --*=* ]] && compset -P '*='
    (( $#suffixes )) && _files -g "$suffixes"
    (( $#described )) && _describe -V unsorted described
    (( $#named )) && compadd -V unsorted -a named
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
_FISH = r"""
function %(complete_func)s
    set -l current (commandline -ct)
    set -l value (string replace -r -- '^--[^=]*=' '' $current)
    set -l option (string match -r -- '^--[^=]*=' $current; or echo '')
    set -l words (commandline -cop) $current
    set -lx COMP_WORDS (string join \n -- $words | string collect)
    set -lx COMP_CWORD (math (count $words) - 1)
    set -lx %(complete_var)s fish_complete
    for line in ($words[1])
        set -l item (string split \t -- $line)
        switch $item[1]
            case dir
                __fish_complete_directories $value
            case file
                __fish_complete_path $value
            case suffix
                for path in (__fish_complete_path $value)
                    set -l name (string split \t -- $path)[1]
                    string match -q -r -- (string escape --style=regex -- $item[2])'$|/$' $name
                    and echo $option$name
                end
            case plain
                echo $option$item[2]\t$item[3]
        end
    end
end
complete --no-files --command %(prog_name)s --arguments '(%(complete_func)s)'
"""


class WordsComplete(ShellComplete):
    """Completion of the words that a shell passes in ``COMP_WORDS``, one per line.

    Prints a line per item: kind, value and help, separated by tabs.
    """

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, without the command, and the word to complete."""
        words = os.environ["COMP_WORDS"].split("\n")
        index = int(os.environ["COMP_CWORD"])
        args = [_unquote(w) for w in words[1:index] if w != "="]  # bash splits --option=value
        word = words[index] if index < len(words) else ""
        return args, "" if word == "=" else _unquote(word)

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Return the line of one item."""
        help_text = " ".join((item.help or "").split())
        return f"{item.type}\t{item.value}\t{help_text}"


class _Bash(WordsComplete):
    name = "bash"
    source_template = _BASH


class _Zsh(WordsComplete):
    name = "zsh"
    source_template = _ZSH


class _Fish(WordsComplete):
    name = "fish"
    source_template = _FISH


_SHELLS = {shell.name: shell for shell in (_Bash, _Zsh, _Fish)}


def _unquote(word: str) -> str:
    parts = split_arg_string(word)
    return parts[0] if parts else ""


def install() -> None:
    """Register the classes of this module with click, which runs them by ``VARIABLE``."""
    for shell in _SHELLS.values():
        add_completion_class(shell)


Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]


def complete_files(*suffixes: str) -> Completer:
    """Return a completer of folders and of files with one of ``suffixes``, by default all."""
    items = [CompletionItem(s, type=SUFFIX) for s in suffixes] or [CompletionItem("", type="file")]
    return lambda context, parameter, word: items


def complete_words(words: Iterable[str]) -> Completer:
    """Return a completer of fixed words for an option that also accepts others."""
    known = tuple(words)
    return lambda context, parameter, word: [CompletionItem(w) for w in known if w.startswith(word)]


def complete_algorithms(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem[str]]:
    """Return the algorithms of the collective given so far; files where ALGO may be a file."""
    from miraccl.schedule import catalog

    wanted = _given_collective(context)
    items = []
    for name in catalog.names():
        algorithm = catalog.get(name)
        labels = {c.label for c in algorithm.collectives}
        if name.startswith(word) and (wanted is None or wanted in labels):
            items.append(CompletionItem(name, help=algorithm.description))
    if not items and isinstance(parameter, click.Argument):
        return [CompletionItem("", type="file")]
    return items


def _given_collective(context: click.Context) -> str | None:
    """Return the collective that the words before the cursor select, or None."""
    if context.get_parameter_source("collective") is ParameterSource.COMMANDLINE:
        return str(context.params["collective"])
    # Before an option without its value click leaves the arguments unparsed in ``args``.
    words = [context.params.get("op"), *context.args]
    labels = {c.label for c in Collective}
    return next((w for w in words if w in labels), None)


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(tuple(_SHELLS)))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options, operations, algorithms and
    topology files of miraccl.

    \b
    Examples:
      source <(miraccl completion bash)                # ~/.bashrc
      source <(miraccl completion zsh)                 # ~/.zshrc, after compinit
      miraccl completion fish | source                 # ~/.config/fish/config.fish
    """
    root = click.get_current_context().find_root()
    print(_SHELLS[shell](root.command, {}, "miraccl", VARIABLE).source().strip())
