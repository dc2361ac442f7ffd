"""TLS handshakes of the clients of one port. A handshake costs the event loop a millisecond, for a client without a key, so
few begin in one turn of the event loop, and addresses take turns. Nothing is made for a client before its first message is
whole and its turn has come. A client that sends this message in parts waits for a turn after each of them. Addresses whose
clients have made a handshake of late wait behind no others, which a flood may invent by the thousand.
"""

import asyncio
import collections
import ssl
import time
from collections.abc import Callable

from tidegate_gateway import process_memory, reading_turns, turn_line
from tidegate_gateway.edge import client_addresses, client_hello, client_transport, tls_records

AT_ONCE, LOOKS_S = 3, 0.003
"""Handshakes that begin in one turn of the event loop, and the time for clients that turn out to be gone. In this time more
of them leave the line than a port accepts in a turn."""
KNOWN_AT_ONCE = 2
"""Of these, handshakes of known addresses, while others wait too."""
MOST_KNOWN = 4096
"""Addresses whose clients have made a handshake of late."""
MOST_OPEN = 1000
"""Handshakes that have begun and wait for their clients; each has 80 KiB. A client answers within a round trip, and when
there are more, the connection of the one that has waited longest is cut, one of an unknown address first."""
WITHIN_S = 10.0
"""For the first message of a client, and again for its answer, unless the port has less."""
GIVE_BACK, GIVE_BACK_S = 500, 3.0
"""After so many handshakes, and then so long, the memory of those that are over goes back to the system."""
CLOSING_S = 2.0
"""For a client to answer the end of an encrypted connection."""


class HandshakeLine:
    """The handshakes of one port that wait for their turn, or for their clients."""

    def __init__(self, turns: reading_turns.ReadingTurns) -> None:
        """Connections take `turns` for the parts of their first messages, and for their records."""
        self.turns = turns
        self._known: turn_line.TurnLine[TlsHandshake] = turn_line.TurnLine()
        """By the client's address, if it is known."""
        self._unknown: turn_line.TurnLine[TlsHandshake] = turn_line.TurnLine()
        self._open: dict[bool, dict[TlsHandshake, None]] = {False: {}, True: {}}
        """By whether the address is known."""
        self._addresses: collections.OrderedDict[str, None] = collections.OrderedDict()
        """Those that are known; the one that was seen last comes last."""
        self._scheduled = False
        self._count = 0
        """Handshakes since memory was given back."""

    def join(self, handshake: "TlsHandshake") -> None:
        """The first message of the client has arrived."""
        line = self._known if handshake.address in self._addresses else self._unknown
        line.add(handshake.address, handshake)
        self._schedule()

    def leave(self, handshake: "TlsHandshake") -> None:
        """The connection is lost before its turn."""
        self._known.remove(handshake)
        self._unknown.remove(handshake)

    def __len__(self) -> int:
        """The handshakes that wait for their turn."""
        return len(self._known) + len(self._unknown)

    def began(self, handshake: "TlsHandshake") -> None:
        """The handshake waits for its client."""
        self._open[handshake.address in self._addresses][handshake] = None
        if sum(map(len, self._open.values())) > MOST_OPEN:
            among = self._open[False] or self._open[True]
            oldest = next(iter(among))
            del among[oldest]
            oldest.abort()

    def ended(self, handshake: "TlsHandshake", *, made: bool) -> None:
        """The handshake was `made`, or has failed."""
        for among in self._open.values():
            among.pop(handshake, None)
        if made:
            self._addresses[handshake.address] = None
            self._addresses.move_to_end(handshake.address)
            if len(self._addresses) > MOST_KNOWN:
                self._addresses.popitem(last=False)
        self._count += 1
        if self._count == GIVE_BACK:
            asyncio.get_running_loop().call_later(GIVE_BACK_S, self._give_memory_back)

    def _give_memory_back(self) -> None:
        self._count = 0
        asyncio.get_running_loop().run_in_executor(None, process_memory.give_back)

    def _schedule(self) -> None:
        if len(self) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._scheduled = False
        begun, until_s = 0, time.monotonic() + LOOKS_S
        while len(self) and begun < AT_ONCE:
            line = self._known if self._known and (begun < KNOWN_AT_ONCE or not self._unknown) else self._unknown
            if line.pop().start():
                begun += 1
            elif time.monotonic() > until_s:
                break
        self._schedule()


class TlsHandshake(asyncio.Protocol):
    """Stands in the place of a connection until its client has made the TLS handshake."""

    def __init__(
        self,
        plain: asyncio.Transport,
        connection: asyncio.Protocol,
        begin: Callable[[asyncio.Transport], None],
        encryption: ssl.SSLContext,
        line: HandshakeLine,
        *,
        within_s: float,
        takes_plain: bool = False,
    ) -> None:
        """`begin` gets the encrypted transport, and the connection the bytes after that. The connection is lost when the
        client fails the handshake, or takes longer than `within_s` for its part of it. With `takes_plain` a client whose
        first byte is not of TLS gets the transport as it is."""
        self.address = client_addresses.address_of(plain)
        self._plain = plain
        self._connection: asyncio.Protocol | None = connection
        self._begin: Callable[[asyncio.Transport], None] | None = begin
        self._encryption = encryption
        self._line = line
        self._takes_plain = takes_plain
        self._within_s = min(within_s, WITHIN_S)
        self._early = bytearray()
        """The first message of the client, and later what came before `begin`."""
        self._first = client_hello.FirstMessage()
        self._has_joined = False
        self._task: asyncio.Task[None] | None = None
        plain.set_protocol(self)
        self._timer = asyncio.get_running_loop().call_later(self._within_s, plain.abort)

    def data_received(self, data: bytes) -> None:
        self._early += data
        if self._has_joined:
            return
        if self._takes_plain and self._early[0] != client_hello.HANDSHAKE:
            self._go_on_in_plain_text()
            return
        may_begin = self._first.may_begin(self._early)
        if may_begin is False:
            self.abort()
            return
        self._plain.pause_reading()
        if may_begin:
            self._has_joined = True
            self._timer.cancel()
            self._line.join(self)
        else:
            self._line.turns.join(self._read_on, self.address)

    def _read_on(self) -> None:
        """The next part of the first message may come."""
        if not self._plain.is_closing():
            self._plain.resume_reading()

    def _go_on_in_plain_text(self) -> None:
        connection, begin = self._connection, self._begin
        self._timer.cancel()
        self._forget()
        if connection is not None and begin is not None:
            self._plain.set_protocol(connection)
            begin(self._plain)
            connection.data_received(bytes(self._early))

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(error)

    def abort(self) -> None:
        """Cuts the connection."""
        self._plain.abort()

    def start(self) -> bool:
        """Begins the handshake, unless its client is gone."""
        if self._connection is None or self._plain.is_closing():
            return False
        if client_transport.hung_up(self._plain):
            self.abort()
            return False
        self._line.began(self)
        self._task = asyncio.get_running_loop().create_task(self._run())
        return True

    async def _run(self) -> None:
        transport = None
        try:
            transport = await self._encrypted()
        finally:
            self._line.ended(self, made=transport is not None)
            self._task = None
            if transport is None or self._plain.is_closing():
                self._plain.abort()
                self._lose(None)
        connection, begin = self._connection, self._begin
        if transport is not None and connection is not None and begin is not None:
            self._forget()
            transport.set_read_buffer_limits(tls_records.WAITING_BYTES)  # type: ignore[attr-defined]
            transport.set_protocol(connection)
            begin(transport)
            if self._early:
                connection.data_received(bytes(self._early))

    async def _encrypted(self) -> asyncio.Transport | None:
        loop = asyncio.get_running_loop()
        loop.call_soon(_feed, self._plain, bytes(self._early), self._line.turns)
        self._early.clear()
        try:
            return await loop.start_tls(
                self._plain,
                self,
                self._encryption,
                server_side=True,
                ssl_handshake_timeout=self._within_s,
                ssl_shutdown_timeout=CLOSING_S,
            )
        except OSError:  # errors of TLS among them
            return None

    def _lose(self, error: Exception | None) -> None:
        connection = self._connection
        self._timer.cancel()
        if self._has_joined:
            self._line.leave(self)
        else:
            self._line.turns.leave(self._read_on)
        self._forget()
        if connection is not None:
            connection.connection_lost(error)

    def _forget(self) -> None:
        """Lets go of the connection, which would wait for the garbage collector with all that this one has."""
        self._connection = self._begin = None


def _feed(plain: asyncio.Transport, early: bytes, turns: reading_turns.ReadingTurns) -> None:
    """Gives bytes to the TLS protocol of the transport, unless its client is gone. Later ones are decrypted in turns."""
    protocol = plain.get_protocol()
    if protocol is not None and not plain.is_closing():
        tls_records.TlsRecords(plain, turns)
        tls_records.give(protocol, early)
