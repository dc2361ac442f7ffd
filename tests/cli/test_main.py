"""A user's mistake, or Ctrl-C at any time, gives no traceback."""

import pathlib
import subprocess
import sys

import pytest

from tidegate_cli import main, processes

INTERRUPTED_WHILE_A_COMMAND_IS_IMPORTED = """
import signal, sys
from tidegate_cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "tidegate_cli.policy_command":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.exit(main.main(["policy", "get"]))
"""


def test_ctrl_c_while_a_command_is_imported_prints_nothing() -> None:
    command = [sys.executable, "-c", INTERRUPTED_WHILE_A_COMMAND_IS_IMPORTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rates", "abc"], "--rates: 'abc' is not a list of numbers such as 0.5,1,2"),
        (["--rates", "nan"], "--rates: a rate must be positive"),
        (["--seeds", "x"], "--seeds: must be a whole number of at least 1, not 'x'"),
        (["--checked-share", "half"], "--checked-share: must be a number between 0 and 1, not 'half'"),
    ],
)
def test_a_word_in_place_of_a_number_is_named_with_the_form_of_the_option(words: list[str], says: str) -> None:
    done = subprocess.run(processes.ourselves("bench", "relquery", *words), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    "words", [["up", "--enginez=vllm"], ["policy", "get", "--enginez=vllm"], ["--enginez=vllm", "up"]]
)
def test_an_unknown_option_is_named_in_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        "'--enginez=vllm' is no option or argument of this command; --help after the command lists all\n"
    )
    assert said.count("\n") == 1


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{pathlib.Path(sys.executable).parent}/tidegate version | true"
    for _ in range(3):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
