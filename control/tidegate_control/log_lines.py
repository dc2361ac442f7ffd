"""One record is one line of the log: text of clients, engines and other people cannot forge further lines.

`Formatter` escapes control characters in messages and marks the lines of tracebacks. It shortens what is longer than a
person reads: a value of 200 KB, such as an annotation, must not be copied whole into the log.
"""

import bisect
import logging
import re

from tidegate_control import log_output

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MARK = "  | "
"""Before each line of a traceback; no record begins with it."""
MOST_CHARACTERS = 4000
"""Of a line, without the remark that tells how many more there were."""
MOST_OF_TRACEBACK = 20_000
"""Characters of a traceback, half of them from its end, where the exception is named."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Formatter(logging.Formatter):
    """The format of the logs of gateways and operators."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return shortened(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        return _marked(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:
        return _marked(super().formatStack(stack_info))


def configure(level: str) -> None:
    """Writes the log of this process to stderr, whether it is read or not."""
    handler = log_output.LogOutput()
    handler.setFormatter(Formatter())
    logging.basicConfig(level=level, handlers=[handler])


def escaped(text: str) -> str:
    """Text in which control characters are written as escapes."""
    return _CONTROL.sub(_escape, text)


def shortened(text: str) -> str:
    """As `escaped`, but of a long text only the beginning, and how much was left out."""
    longest = min(len(text), MOST_CHARACTERS)
    shown = escaped(text[:longest])
    if len(shown) > MOST_CHARACTERS:
        longest = bisect.bisect_right(range(longest + 1), MOST_CHARACTERS, key=lambda end: len(escaped(text[:end]))) - 1
        shown = escaped(text[:longest])
    return f"{shown}... ({len(text) - longest} more characters)" if longest < len(text) else shown


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _marked(text: str) -> str:
    if (left_out := len(text) - MOST_OF_TRACEBACK) > 0:
        half = MOST_OF_TRACEBACK // 2
        text = f"{text[:half]}\n... ({left_out} more characters)\n{text[-half:]}"
    return "\n".join(MARK + shortened(line) for line in text.split("\n"))
