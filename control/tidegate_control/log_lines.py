"""One record is one line of the log: text of clients, engines and other people cannot forge further lines.

`Formatter` escapes control characters in messages and marks the lines of tracebacks.
"""

import logging
import re

from tidegate_control import log_output

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MARK = "  | "
"""Before each line of a traceback; no record begins with it."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Formatter(logging.Formatter):
    """The format of the logs of gateways and operators."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

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


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _marked(text: str) -> str:
    return "\n".join(MARK + escaped(line) for line in text.split("\n"))
