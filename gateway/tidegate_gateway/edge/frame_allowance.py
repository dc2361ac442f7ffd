"""How many frames of HTTP/2 a peer may send that make work and bring no call: refused streams, calls without a valid key,
pings, settings, their acknowledgements, empty data, heads in many parts, further heads of a stream, updates of windows that
neither a call nor data explain, and kinds of frames that mean nothing here (CVE-2019-9511, -9512, -9513, -9514, -9515,
-9518, CVE-2024-27316). Clients and proxies send few. A head of many fields or bytes that brings no call counts as several
frames, because it costs as much as they do. So does another window for many streams. A peer that sends more of them loses
its connection.

Calls that are given up soon after they began and before their answer (CVE-2023-44487) have an allowance of their own, and
a peer that gives up more of them is read more slowly: a client that gives up all its calls at once is no enemy, and the
other calls of its connection go on (decision 59).
"""

import time
from collections.abc import Callable

from tidegate_gateway.edge import http2_frames

FIRST, BURST, PER_S = 100, 200, 200.0
"""A connection begins with the first number."""
GIVEN_UP = 5.0
"""So many times as many calls may be given up."""
LATE = 50
"""So many frames of data for streams that have ended cost as much as one frame that brings no call."""
LONGEST_REST_S = 2.0
MOST_OWED = 1000
"""Frames that a peer may keep back of those that it has reason for."""


class FrameAllowance:
    """A bucket of frames, which fills up again with time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, times: float = 1.0) -> None:
        """`times` as many frames as `FIRST`, `BURST` and `PER_S` say."""
        self._clock = clock
        self._left, self._burst, self._per_s = times * FIRST, times * BURST, times * PER_S
        self._at_s = clock()
        self._late = 0
        """Frames for streams that have ended."""
        self._owed = 0
        """Frames that the data sent so far give the peer reason for."""

    def owe_call(self) -> None:
        """A call has begun. Some clients open its window further before there are data."""
        self._owed = min(self._owed + 2, MOST_OWED)

    def owe(self) -> None:
        """A frame of data was sent, which gives the peer reason for three: an update of the stream's window, one of the
        connection's, and a ping, by which some clients measure the way."""
        self._owed = min(self._owed + 3, MOST_OWED)

    def spend_owed(self) -> None:
        """A frame came for which data may have given the peer reason. Raises `ConnectionBroken`."""
        if self._owed:
            self._owed -= 1
        else:
            self.spend()

    def spend_late(self) -> None:
        """A frame came for a stream that ended, or was not served, while the frame was on its way. Raises
        `ConnectionBroken`."""
        self._late += 1
        if not self._late % LATE:
            self.spend()

    def spend(self, frames: int = 1) -> None:
        """Takes so many frames. Raises `ConnectionBroken` if there are not so many left."""
        self._fill(frames)
        if self._left < frames:
            raise http2_frames.ConnectionBroken(http2_frames.ENHANCE_YOUR_CALM, "too many frames that bring no call")
        self._left -= frames

    def overspend(self, frames: int) -> float:
        """Takes so many frames, also if there are not so many left. Returns the seconds after which there are some again,
        at most `LONGEST_REST_S`."""
        self._fill(frames)
        self._left -= frames
        return min(-self._left / self._per_s, LONGEST_REST_S) if self._left < 0.0 else 0.0

    def _fill(self, frames: int) -> None:
        if self._left < frames:
            now_s = self._clock()
            self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
