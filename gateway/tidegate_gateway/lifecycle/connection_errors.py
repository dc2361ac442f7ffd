"""The error of a connection to an engine.

It has a module of its own, because mypyc does not compile a subclass of `OSError`.
"""


class ConnectionLost(OSError):
    """The connection cannot be made, has broken, or does not carry HTTP/1.1."""
