"""What the operator makes of answers that no API server should give, and of a token that cannot be read."""

import asyncio
import functools
import json
import urllib.parse

import pytest
from kubernetes.aio import client

from tidegate_operator import objects
from tidegate_operator.cluster import ClusterError, RejectedError, api_server, object_parts

SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "prod", "name": "chat"}, "spec": {}}


class Answer:
    reason = "reason"

    def __init__(self, body, status=200, headers=None):
        self._body, self.status, self.headers = body, status, headers or {}

    async def read(self):
        return self._body


class Answering(client.ApiClient):
    """A connection to a server that answers each request with `body`."""

    body, status, headers = b"{}", 200, None

    async def call_api(self, *request, **options):
        return Answer(self.body, self.status, self.headers)


@pytest.fixture
async def connection():
    async with Answering(client.Configuration()) as api:
        yield api


@pytest.mark.parametrize("body", [b"<html>the login page of a proxy</html>", b"", b"null", b"[]", b"\xff"])
async def test_an_answer_that_is_no_json_object_is_an_error_after_which_trying_again_may_help(connection, body):
    connection.body = body
    server = api_server.ApiServer(connection, instance="test")
    with pytest.raises(ClusterError, match="no JSON"):
        await server.pool("prod", "chat")
    with pytest.raises(ClusterError, match="no JSON"):
        await server.check_pools("prod")
    with pytest.raises(ClusterError, match="no JSON"):
        await server.lease("prod", "tidegate").read()


@pytest.mark.parametrize("body", [b"{}", b'{"items": null}', b'{"items": {}}', b'{"items": [7]}', b'{"items": [{}]}'])
async def test_a_list_without_objects_is_such_an_error(connection, body):
    connection.body = body
    server = api_server.ApiServer(connection, instance="test")
    for asked in (server.pool_keys("prod"), server.pods("prod", "chat"), server.autoscalers("prod")):
        with pytest.raises(ClusterError, match="the answer to GET /"):
            await asked


@pytest.mark.parametrize("body", [b"{}", b'{"metadata": null}', b'{"error": "the page of a proxy"}'])
async def test_an_answer_without_metadata_is_no_object(connection, body):
    connection.body = body
    server = api_server.ApiServer(connection, instance="test")
    lease = server.lease("prod", "tidegate")
    for asked in (
        server.pool("prod", "chat"), server.apply(SERVICE), server.claim("prod", "chat", "prod/tidegate"),
        server.apply_status("prod", "chat", {}, writer="test"), lease.read(), lease.write({"spec": {}}),
    ):  # fmt: skip
        with pytest.raises(ClusterError, match="without metadata"):
            await asked


async def test_no_object_that_is_read_has_the_record_of_its_field_owners(connection):
    given = {**SERVICE, "metadata": {**SERVICE["metadata"], "managedFields": [{"manager": "kubectl"}]}}
    server = api_server.ApiServer(connection, instance="test")
    connection.body = json.dumps(given).encode()
    found = [
        await server.pool("prod", "chat"),
        await server.apply(SERVICE),
        await server.apply_status("prod", "chat", {}, writer="test"),
    ]
    connection.body = json.dumps({"items": [given]}).encode()
    assert [*found, *await server.pods("prod", "chat")] == [SERVICE] * 4


@pytest.mark.parametrize(
    ("stated", "pause_s"),
    [
        ("7", 7.0),
        ("0", 0.0),
        (None, 0.0),
        ("soon", 0.0),
        ("-1", 0.0),
        ("100000", 600.0),
        ("9" * 5000, 0.0),
        ("\u0663", 0.0),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_an_api_server_that_has_too_much_to_do_may_ask_for_a_pause(connection, status, stated, pause_s):
    connection.status, connection.headers = status, {} if stated is None else {"Retry-After": stated}
    server = api_server.ApiServer(connection, instance="test")
    for asked in (server.pool("prod", "chat"), server.apply(SERVICE), server.lease("prod", "tidegate").read()):
        with pytest.raises(ClusterError) as raised:
            await asked
        assert raised.value.retry_after_s == pause_s
        assert raised.value.status == status


async def test_an_error_tells_whether_the_api_server_answered(connection):
    connection.status = 403
    with pytest.raises(RejectedError) as raised:
        await api_server.ApiServer(connection, instance="test").lease("prod", "tidegate").read()
    assert raised.value.status == 403
    connection.status, connection.body = 200, b"<html>the login page of a proxy</html>"
    with pytest.raises(ClusterError) as raised:
        await api_server.ApiServer(connection, instance="test").lease("prod", "tidegate").read()
    assert raised.value.status is None


async def test_a_missing_right_to_list_autoscalers_is_logged_once_for_each_namespace(connection, caplog):
    server = api_server.ApiServer(connection, instance="test")
    for namespace, status, logged in [
        ("prod", 403, 1), ("prod", 403, 1), ("test", 403, 2), ("prod", 403, 2), ("prod", 200, 2), ("prod", 403, 3),
    ]:  # fmt: skip
        connection.status, connection.body = status, b'{"items": []}'
        assert await server.autoscalers(namespace) == []
        assert len(caplog.records) == logged


async def test_an_autoscaler_of_too_many_parts_is_left_out(connection):
    scaler = {"metadata": {"name": "chat"}, "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "chat-engine"}}}
    large = {**scaler, "metadata": {"name": "large", "annotations": {"note": "{" * (object_parts.MOST_PARTS + 1)}}}
    connection.body = json.dumps({"items": [large, scaler]}).encode()
    assert await api_server.ApiServer(connection, instance="test").autoscalers("prod") == [scaler]


async def test_a_token_that_cannot_be_read_is_such_an_error_too(connection):
    def refresh(configuration):
        raise FileNotFoundError("the file of the token")

    connection.configuration.api_key["BearerToken"] = "bearer old"
    connection.configuration.refresh_api_key_hook = refresh
    with pytest.raises(ClusterError, match="the file of the token"):
        await api_server.ApiServer(connection, instance="test").pool("prod", "chat")


def test_a_nested_field_that_an_older_resource_lacks_leaves_its_neighbours():
    message = (
        ".status.rollout.stops: field not declared in schema, .status.nodePools[0].new: field not declared in schema"
    )
    assert api_server.UNDECLARED.findall(message) == ["rollout.stops", "nodePools"]
    status = {"rollout": {"stops": 1, "phase": "Failed"}, "nodePools": [], "url": "x"}
    found = functools.reduce(api_server._without, (["rollout", "stops"], ["nodePools"]), status)
    assert found == {"rollout": {"phase": "Failed"}, "url": "x"}


class Slow(client.ApiClient):
    """A connection to a server that takes a second for each request, and has no object."""

    asked, refused = 0, ""

    async def call_api(self, *request, **options):
        self.asked += 1
        await asyncio.sleep(1)
        if self.refused and self.refused in request[1]:
            return Answer(b"{}", 403)
        return Answer(b'{"items": []}')


@pytest.mark.parametrize("refused", ["", "services"])
def test_a_slow_api_server_lists_all_children_of_a_pool_in_the_time_of_one_list(in_virtual_time, refused):
    async def story():
        async with Slow(client.Configuration()) as api:
            api.refused = refused
            began_at_s = asyncio.get_running_loop().time()
            listed = api_server.ApiServer(api, instance="test").children("prod", "chat")
            if refused:
                with pytest.raises(RejectedError):
                    await listed
            else:
                assert await listed == []
            assert api.asked == len(objects.CHILD_KINDS)
            return asyncio.get_running_loop().time() - began_at_s

    assert in_virtual_time(story()) == 1


class Paged(client.ApiClient):
    """A server with ten ConfigMaps, of which a page has four; every third belongs to the pool."""

    def __init__(self, configuration):
        super().__init__(configuration)
        self.asked = []

    async def call_api(self, *request, **options):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(request[1]).query))
        if "/configmaps" not in request[1]:
            return Answer(b'{"items": []}')
        self.asked.append(query)
        first = int(query.get("continue", 0))
        items = [self.item(number) for number in range(first, min(first + int(query["limit"]), 10))]
        further = {"continue": str(first + len(items))} if first + len(items) < 10 else {}
        return Answer(json.dumps({"metadata": further, "items": items}).encode())

    def item(self, number):
        owner = {"kind": "ServingPool", "name": "chat", "uid": "u", "controller": True}
        metadata = {"namespace": "prod", "name": f"map-{number}", "uid": str(number), "labels": LABELS}
        return {"metadata": metadata | {"ownerReferences": [owner] * (number % 3 == 0)}, "data": {"text": "x" * 10_000}}


LABELS = {"tidegate.dev/pool": "chat"}


async def test_labelled_objects_are_listed_in_pages_and_those_of_other_owners_by_name(monkeypatch):
    monkeypatch.setattr(object_parts, "MOST_LISTED_BYTES", 48_000)
    async with Paged(client.Configuration()) as api:
        found = await api_server.ApiServer(api, instance="test").children("prod", "chat")
    assert [query.get("continue") for query in api.asked] == [None, "4", "8"]
    assert {query["labelSelector"] for query in api.asked} == {"tidegate.dev/pool=chat"}
    whole = [body["metadata"]["name"] for body in found if "data" in body]
    assert whole == ["map-0", "map-3", "map-6"], "the fourth has no room"
    assert len(found) == 9
    assert all(body["kind"] == "ConfigMap" for body in found)
