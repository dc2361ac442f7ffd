"""May this process open as many files as its settings need?"""

import dataclasses
import logging
import resource

from tidegate_gateway import gateway_settings

logger = logging.getLogger("tidegate.gateway")

FOR_EACH, OTHERS = 2, 256
"""Open files for each of `limits.connections`, and those of everything else. Each connection may need two: for a client and
the engine of its call, or for a client of each port."""


def fitted(settings: gateway_settings.Settings) -> gateway_settings.Settings:
    """Raises the limit of open files of this process as far as it may, and bounds `limits.connections` by it."""
    needed = FOR_EACH * settings.limits.connections + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return within(settings, soft)


def within(settings: gateway_settings.Settings, files: int) -> gateway_settings.Settings:
    """The settings with as many connections as `files` open files allow, at least one."""
    limits = settings.limits
    most = max((files - OTHERS) // FOR_EACH, 1)
    if limits.connections <= most:
        return settings
    logger.warning(
        "limits.connections is %d, and %d open files suffice for %d: the ports take so many. Raise the limit of open files"
        " to %d (ulimit -n, or LimitNOFILE of systemd) or lower limits.connections",
        limits.connections, files, most, FOR_EACH * limits.connections + OTHERS,
    )  # fmt: skip
    return dataclasses.replace(settings, limits=dataclasses.replace(limits, connections=most))
