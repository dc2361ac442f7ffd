"""Was the wall clock set? State that outlives its process has instants of the wall clock, and durations must not follow its
steps."""

CLOCK_STEP_S = 5.0
"""A wall clock that differs by more from the time that has passed was set."""


class ClockSteps:
    """The steps of a wall clock, as a clock that is never set shows them."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        """Both clocks at the last reading, in seconds."""

    def step_s(self, now: float, monotonic_s: float | None) -> float:
        """The seconds by which the wall clock was set since the last reading; 0 if it was not. Instants from before are to
        be moved by so much. `now` is in seconds of the wall clock. `monotonic_s` is the time of a clock that is never set,
        read at the same moment; None tells nothing."""
        last, self._last = self._last, None if monotonic_s is None else (now, monotonic_s)
        if last is None or monotonic_s is None:
            return 0.0
        step_s = now - last[0] - (monotonic_s - last[1])
        return step_s if abs(step_s) > CLOCK_STEP_S else 0.0
