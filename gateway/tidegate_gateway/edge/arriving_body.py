"""The body of a request while it arrives: its pieces, its bounds, and its bytes in the budget of all bodies.

The body of a call is JSON, and a large one takes long to parse. So it is looked at while it arrives, and a body that
no call may have is refused before the rest of it is read (`openai.large_body`).
"""

from tidegate_gateway import tenant_budget
from tidegate_gateway.edge import framing_errors
from tidegate_gateway.openai import error_table, large_body
from tidegate_policy.model import DropReason


class ArrivingBody:
    """The body of the present request of one connection."""

    __slots__ = ("_arrived", "_held", "_is_call", "_large", "_most_bytes", "_pieces", "_seen", "_small_pieces", "size")

    def __init__(self, held: tenant_budget.Held) -> None:
        """`held` is what the connection holds of the budget of all bodies."""
        self._held = held
        self._pieces: list[bytes] = []
        self._arrived = 0
        """The pieces that have come; those that are looked at are joined."""
        self._large: large_body.LargeBody | None = None
        self._seen = 0
        """The pieces at the beginning that `_large` has seen."""
        self._most_bytes = self._small_pieces = 0
        self._is_call = False
        self.size = 0
        """The bytes so far."""

    def begin(self, *, most_bytes: int, small_pieces: int, is_call: bool) -> None:
        """Takes a new body. So many of its pieces may be small. With `is_call` it is the JSON of a call."""
        self.drop()
        self._most_bytes, self._small_pieces = most_bytes, small_pieces
        self._is_call, self._large = is_call, None

    def add(self, piece: bytes) -> None:
        """Takes the next bytes. Raises `GatewayError` for a body that is refused."""
        self.size += len(piece)
        self._held.add(len(piece))
        if self.size > self._most_bytes:
            raise framing_errors.body_too_large(self._most_bytes)
        if not self._held.fits:
            raise error_table.Shed(DropReason.SATURATED)
        self._pieces.append(piece)
        self._arrived += 1
        if self._arrived > self._small_pieces + self.size // framing_errors.PIECE_BYTES:
            raise framing_errors.small_chunks(self._small_pieces)
        if self._is_call and self.size >= large_body.BLOCK_BYTES:
            self._look(large_body.BLOCK_BYTES)

    def taken(self) -> tuple[bytes, bool]:
        """The whole body, whose bytes stay in the budget, and whether its values are counted. Raises `GatewayError`."""
        is_counted = self._large is not None
        if is_counted:
            self._look(1)
        body = b"".join(self._pieces)  # nearly every body comes in one piece, which is not copied
        self._pieces, self._seen, self._arrived, self.size = [], 0, 0, 0
        return body, is_counted

    def drop(self) -> None:
        """Lets go of what has arrived."""
        self._held.add(-self.size)
        self._pieces, self._seen, self._arrived, self.size = [], 0, 0, 0

    def _look(self, least_bytes: int) -> None:
        """Looks at the bytes that have come since the last look, in one piece, if there are so many."""
        large = self._large = self._large or large_body.LargeBody()
        if self.size < large.seen + least_bytes:
            return
        block = b"".join(self._pieces[self._seen :])
        self._pieces[self._seen :] = [block]
        self._seen += 1
        large.add(block, self._pieces)
