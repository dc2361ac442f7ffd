"""May a TLS handshake begin? What the first message of a client (ClientHello, RFC 8446, 4.1.2) asks of the server is known
before any work is done for it.

A client whose first key is one of a finite field (ffdhe2048 to ffdhe8192) costs up to 120 ms of one core, 200 times as much
as one with an elliptic curve, and Python's `ssl` cannot turn these groups off. No client has only them, so it is refused.
"""

MOST_BYTES = 16 * 1024
"""Of a first message. Those of browsers have 2 KB."""
MOST_RECORDS = 64
"""In which a first message may come; clients take one."""
HANDSHAKE = 22
"""The first byte of a client that begins with TLS."""
_RECORD_BYTES, _CLIENT_HELLO = 5, 1
_GROUPS, _KEYS = 10, 51
_ELLIPTIC = frozenset((23, 24, 25, 29, 30))
_FINITE = range(0x100, 0x200)


def may_begin(sent: bytes) -> bool | None:
    """Whether the handshake may begin; None = the first message has not arrived as a whole."""
    message = bytearray()
    at = records = 0
    while at < len(sent):
        records += 1
        if records > MOST_RECORDS or sent[at] != HANDSHAKE:
            return False
        size = int.from_bytes(sent[at + 3 : at + _RECORD_BYTES])
        message += sent[at + _RECORD_BYTES : at + _RECORD_BYTES + size]
        at += _RECORD_BYTES + size
        if len(message) < 4:
            continue
        whole = 4 + int.from_bytes(message[1:4])
        if message[0] != _CLIENT_HELLO or whole > MOST_BYTES:
            return False
        if len(message) >= whole:
            return _is_cheap(bytes(message[4:whole]))
    return None if len(sent) <= 2 * MOST_BYTES else False


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
