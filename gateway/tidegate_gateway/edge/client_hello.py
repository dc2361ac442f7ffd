"""May a TLS handshake begin? What the first message of a client (ClientHello, RFC 8446, 4.1.2) asks of the server is known
before any work is done for it.

A client whose first key is one of a finite field (ffdhe2048 to ffdhe8192) costs up to 120 ms of one core, 200 times as much
as one with an elliptic curve, and Python's `ssl` cannot turn these groups off. No client has only them, so it is refused.
"""

MOST_BYTES = 16 * 1024
"""Of a first message, and of a record (RFC 8446, 5.1). The messages of browsers have 2 KB."""
MOST_RECORDS = 64
"""In which a first message may come; clients take one."""
HANDSHAKE = 22
"""The first byte of a client that begins with TLS."""
_RECORD_BYTES, _CLIENT_HELLO = 5, 1
_GROUPS, _KEYS = 10, 51
_ELLIPTIC = frozenset((23, 24, 25, 29, 30))
_FINITE = range(0x100, 0x200)


class FirstMessage:
    """The first message of one client while it arrives. Each byte is looked at once, however the message is cut."""

    def __init__(self) -> None:
        self._message = bytearray()
        self._read = self._records = 0
        """Bytes of the whole records that have arrived, and how many these are."""

    def may_begin(self, sent: bytearray) -> bool | None:
        """Whether the handshake may begin. `sent` is all that the client has sent so far; None = the first message has not
        arrived as a whole."""
        while len(sent) > self._read:
            if sent[self._read] != HANDSHAKE or self._records == MOST_RECORDS:
                return False
            begin = self._read + _RECORD_BYTES
            if len(sent) < begin:
                break
            end = begin + int.from_bytes(sent[begin - 2 : begin])
            if end - begin > MOST_BYTES:
                return False
            if len(sent) < end:
                break
            self._message += sent[begin:end]
            self._read = end
            self._records += 1
            if len(self._message) >= 4:
                whole = 4 + int.from_bytes(self._message[1:4])
                if self._message[0] != _CLIENT_HELLO or whole > MOST_BYTES:
                    return False
                if len(self._message) >= whole:
                    return _is_cheap(bytes(self._message[4:whole]))
        return None


def _is_cheap(hello: bytes) -> bool:
    """The server will take a key on an elliptic curve, or refuse the handshake."""
    try:
        found = _extensions(hello)
        groups = _numbers(found[_GROUPS][2:]) if _GROUPS in found else []
        keys = _first_numbers(found[_KEYS][2:]) if _KEYS in found else []
    except IndexError:
        return False
    for key in keys:
        if key in _ELLIPTIC:
            break
        if key in _FINITE:
            return False
    return not groups or not _ELLIPTIC.isdisjoint(groups) or not any(group in _FINITE for group in groups)


def _extensions(hello: bytes) -> dict[int, bytes]:
    """The extensions by their numbers. Raises `IndexError` for a message that breaks off."""
    at = 34 + 1 + hello[34]
    at += 2 + _number(hello, at)
    at += 1 + hello[at] + 2
    found: dict[int, bytes] = {}
    while at < len(hello):
        size = _number(hello, at + 2)
        found.setdefault(_number(hello, at), hello[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def _numbers(listed: bytes) -> list[int]:
    return [_number(listed, at) for at in range(0, len(listed), 2)]


def _first_numbers(listed: bytes) -> list[int]:
    """The number in front of each element."""
    found, at = [], 0
    while at < len(listed):
        found.append(_number(listed, at))
        at += 4 + _number(listed, at + 2)
    return found


def _number(data: bytes, at: int) -> int:
    return data[at] << 8 | data[at + 1]
