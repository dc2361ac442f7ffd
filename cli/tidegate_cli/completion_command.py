"""`tidegate completion bash|zsh|fish`: the script that completes the commands and options of `tidegate` in a shell."""

import argparse
import sys

import shtab

from tidegate_cli import main

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """put the script where the shell looks for it:
  tidegate completion bash > ~/.local/share/bash-completion/completions/tidegate
  tidegate completion zsh > "${fpath[1]}/_tidegate"
  tidegate completion fish > ~/.config/fish/completions/tidegate.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(options: argparse.Namespace) -> int:
    sys.stdout.write(shtab.complete(main.whole_parser(), options.shell) + "\n")
    return 0
