"""The errors that a command may raise; `main` prints the message as one sentence.

CommandError
├── Usage   the command line is wrong: exit code 2
└── Failed  an operation failed: exit code 1
"""


class CommandError(Exception):
    """Ends the command with `exit_code`; the message says what the user can do next."""

    exit_code = 1


class Usage(CommandError):
    """The command line is wrong."""

    exit_code = 2


class Failed(CommandError):
    """An operation failed."""
