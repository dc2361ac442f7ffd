"""How far rooflines are from the profiles whose coefficients come from timings, coefficient by coefficient."""

from collections.abc import Iterator, Mapping, Sequence

import tidegate_profiles
from tidegate_profiles import roofline


def ratios(name: str) -> dict[str, float]:
    """The roofline's coefficients over those of a shipped profile, for the coefficients that timings determine."""
    profile = tidegate_profiles.load(name)
    estimated = roofline.estimate(roofline.Facts.of(profile))
    return {each: estimated[each] / profile["cost"][each] for each in profile.get("timed", ())}


def compared(*, measured: bool) -> dict[str, Mapping[str, float]]:
    """By profile: the ratios of those that were fitted to measured runs (`fit`), or of those from published figures."""
    loaded = ((name, tidegate_profiles.load(name)) for name in tidegate_profiles.names())
    return {name: ratios(name) for name, profile in loaded if "timed" in profile and ("fit" in profile) == measured}


def table() -> str:
    """All ratios in Markdown, as the README of the profiles has them."""
    lines = [
        f"| profile | coefficients from | {' | '.join(f'`{each}`' for each in roofline.COEFFICIENTS)} |",
        f"|---|---|{'---|' * len(roofline.COEFFICIENTS)}",
    ]
    for measured, origin in ((True, "measured run"), (False, "published figures")):
        for name, found in compared(measured=measured).items():
            cells = (f"{found[each]:.2f}" if each in found else "-" for each in roofline.COEFFICIENTS)
            lines.append(f"| `{name}` | {origin} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def sentences() -> Iterator[str]:
    """The same in short: the smallest and the largest ratio of each coefficient."""
    kinds = {"measured runs of": True, "published figures of": False}
    for kind, measured in kinds.items():
        found = compared(measured=measured)
        spans = [
            f"{each} {_span(values)}"
            for each in roofline.COEFFICIENTS
            if (values := [one[each] for one in found.values() if each in one])
        ]
        yield f"Estimate over value from {kind} {len(found)} shipped profiles: {', '.join(spans)}."


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
