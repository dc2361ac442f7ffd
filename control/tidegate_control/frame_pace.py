"""How fast frames of HTTP/2 are read that a server sends.

An engine needs a few frames for a report or an answer. A frame of another kind than data counts for more when it is long:
settings and headers cost by their bytes.
"""

from collections.abc import Callable

FRAMES_PER_S = 100.0
"""An engine that reports every tenth of a second sends 20 to 40."""
BURST = 500.0
"""Frames that may come at once."""
BYTES_OF_A_FRAME = 64
"""So many bytes of a frame that carries no data count as a further frame."""
HEAD_BYTES = 9
"""Of each frame: its length (3 bytes), its kind, flags, and its stream."""
DATA, GOAWAY = 0, 7
LONGEST_BYTES = 16 * 1024
"""Of a frame after its head: what HTTP/2 admits where no setting says more (RFC 9113, section 4.2). `h2` collects the
bytes of a longer one before it refuses it."""


class TooLong(Exception):
    """A frame is longer than `LONGEST_BYTES`."""


class FramePace:
    """A bucket of frames, which fills up again with time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.counted = 0
        """Frames that have come."""
        self.has_goaway = False
        """Whether the server has announced the end of the connection."""
        self._left = BURST
        self._at_s = clock()
        self._head = b""
        """The begun head of a frame."""
        self._body_left = 0
        """Bytes until the next frame begins."""

    def read(self, data: bytes) -> float:
        """Counts the frames that begin in `data`, the next bytes of the connection. Returns the seconds to wait before
        more is read. Raises `TooLong`."""
        now_s = self._clock()
        frames = self._count(data)
        self.counted += frames
        self._left = min(BURST, self._left + (now_s - self._at_s) * FRAMES_PER_S) - frames
        self._at_s = now_s
        return max(-self._left / FRAMES_PER_S, 0.0)

    def _count(self, data: bytes) -> int:
        frames, at = 0, 0
        while at < len(data):
            if self._body_left:
                step = min(self._body_left, len(data) - at)
                self._body_left -= step
            else:
                step = HEAD_BYTES - len(self._head)
                self._head += data[at : at + step]
                if len(self._head) == HEAD_BYTES:
                    self._body_left = int.from_bytes(self._head[:3])
                    if self._body_left > LONGEST_BYTES:
                        raise TooLong(f"a frame of {self._body_left} bytes")
                    self.has_goaway |= self._head[3] == GOAWAY
                    frames += 1 if self._head[3] == DATA else 1 + self._body_left // BYTES_OF_A_FRAME
                    self._head = b""
            at += step
        return frames
