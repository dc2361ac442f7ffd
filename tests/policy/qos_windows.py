"""Reports of engines for the tests of steering."""

from tidegate_policy.qos import Histogram, Qos, Tally


def histogram(seconds: float, count: int) -> Histogram:
    tally = Tally()
    for _ in range(count):
        tally.add(seconds)
    return tally.freeze()


def window(
    *,
    arrived: int = 60,
    finished: int = 60,
    missed: int = 0,
    waiting: int = 10,
    ttft_s: float = 0.5,
    work_s: float = 2.0,
) -> Qos:
    """Half a minute in which every finished call had a target."""
    return Qos(
        window_s=30.0,
        arrived=arrived,
        finished=finished,
        waiting=waiting,
        with_target=finished,
        missed=min(missed, finished),
        ttft=histogram(ttft_s, finished),
        service=histogram(work_s, arrived),
    )
