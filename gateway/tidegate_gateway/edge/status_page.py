"""The files of the page at `/`. They hold no data: the script asks `GET /v1/state` for it (`page_state`).

The policy of the page's content permits our own script and style only, so nothing from a client or an engine can run here.
"""

import importlib.resources
from collections.abc import Awaitable, Callable

from tidegate_gateway.edge import http_messages

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page_dom.js": ("page_dom.js", "text/javascript; charset=utf-8"),
    "/page_request.js": ("page_request.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def handler(path: str) -> Callable[[http_messages.Request], Awaitable[http_messages.Response]]:
    """Answers with the file at this path."""
    name, content_type = FILES[path]
    body = importlib.resources.files("tidegate_gateway.edge").joinpath("page", name).read_bytes()

    async def answer(request: http_messages.Request) -> http_messages.Response:
        return http_messages.Response(body=body, content_type=content_type, headers=HEADERS)

    return answer
