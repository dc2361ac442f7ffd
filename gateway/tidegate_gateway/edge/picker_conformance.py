"""What does the conformance suite of the Gateway API Inference Extension want of an endpoint picker beyond the protocol?

The suite sends requests for any path to servers that echo them. It says by a header which endpoints the picker may choose,
and reads from headers of the answer what the picker has chosen and what the proxy has reported. All of this is behind
`picker.conformanceTests`: no client may choose its engine in production. The protocol itself is `ext_proc`'s.
"""

from collections.abc import Mapping

from tidegate_gateway.edge import ext_proc_messages, http_listener, http_messages
from tidegate_gateway.openai import endpoint, http_headers, parsed_request

SELECTION = "test-epp-endpoint-selection"
"""Of a request: the endpoints that the picker may choose, as IP or IP:port with commas between them."""
SERVED, SELECTED, POOL = (
    "x-conformance-test-served-endpoint",
    "x-conformance-test-selected-endpoint",
    "x-conformance-test-epp-pool",
)
"""Of an answer: the endpoint that served by the proxy's report, the endpoint that the picker chose, and the picker's
InferencePool."""
NOT_TOLD = "fail: the proxy has not told the endpoint that served"
KEYS = frozenset({"authorization", "x-api-key"})
"""Headers of a plain request that stop here. The suite compares the others at the server."""
MODEL = "plain"
"""Stands in the place of a model where no engine lists one."""
PLAIN = endpoint.Endpoint(
    name="plain",
    path="",
    operation="plain",
    read_size=lambda body, most: endpoint.RequestSize(),
    is_answer=lambda answer: True,
    prompt_field="",
)
"""Stands in the place of an endpoint of OpenAI's for requests that are no calls."""


async def _carried(request: http_messages.Request) -> http_messages.Response:
    raise AssertionError("the exchange hands plain requests over")


ROUTE = http_listener.Route(method="", path="", handler=_carried)
"""Of all requests that no other route takes."""


def selection(request: http_messages.Request) -> list[str] | None:
    """The endpoints that a request allows; None = all."""
    texts = [text.strip() for text in request.header(SELECTION).split(",")]
    return [text for text in texts if text] or None


def plain(request: http_messages.Request, models: list[str]) -> parsed_request.ParsedRequest:
    """A request that passes as it came, for engines that list these models. Raises `BadRequest` for a wrong header."""
    return parsed_request.ParsedRequest(
        endpoint=PLAIN,
        size=endpoint.RequestSize(),
        body={},
        model=models[0] if models else MODEL,
        stream=False,
        wants_usage=False,
        fields=http_headers.read(http_headers.headers_of(request.headers)),
        raw=request.body,
    )


def removed(headers: ext_proc_messages.Headers) -> list[str]:
    """The names of the headers of a plain request that stop here."""
    return [name for name, _ in headers if name in KEYS]


def told(served: str, selected: str, pool: str) -> Mapping[str, str]:
    """The headers of an answer. `served` is what the proxy has reported, "" for nothing."""
    return {SERVED: served or NOT_TOLD, SELECTED: selected, **({POOL: pool} if pool else {})}
