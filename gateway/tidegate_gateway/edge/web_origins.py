"""Does a request come from a web page of another site? A person's browser reaches the ports of its own machine, also for
pages that the person does not trust.

Browsers say where a request comes from, and pages cannot change it. Other clients say nothing. A page whose name was made
to resolve to this machine (DNS rebinding) looks like a page of this gateway: only the `Host` tells, or a key.
"""

from tidegate_gateway.edge import http_messages


def is_foreign(request: http_messages.Request) -> bool:
    """Whether a browser sent the request for a page of another site or of an unknown one."""
    site, origin = request.header("sec-fetch-site"), request.header("origin").lower()
    if site in ("same-origin", "none"):
        return False  # also behind a proxy that changes the Host
    return site == "cross-site" or (bool(origin) and not is_own(origin, request.header("host").lower()))


def is_own(origin: str, host: str) -> bool:
    """Whether an `Origin` is that of the pages of this `Host`, both in lower case."""
    return origin in (f"http://{host}", f"https://{host}")
