"""What a command may raise; `main` prints it as one sentence.

CommandError
├── Usage   the user's mistake, exit code 2
└── Failed  something that did not work, exit code 1
"""


class CommandError(Exception):
    """Ends the command with `exit_code`; the message says what to do next."""

    exit_code = 1


class Usage(CommandError):
    """The user's mistake."""

    exit_code = 2


class Failed(CommandError):
    """Something that did not work."""
