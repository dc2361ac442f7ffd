"""How long does work take that has a number of parts? An estimate from the parts that are done, for lines of progress."""


def text(done: int, total: int, elapsed_s: float) -> str:
    """Such as `about 40 s left`; empty before the first part and after the last one."""
    if not 0 < done < total:
        return ""
    left_s = elapsed_s / done * (total - done)
    return f"about {left_s:.0f} s left" if left_s < 90 else f"about {left_s / 60:.0f} min left"
