"""What the operator makes of answers that no API server should give, and of a token that cannot be read."""

import pytest
from kubernetes.aio import client

from tidegate_operator.cluster import ClusterError, api_server


class Answer:
    status = 200

    def __init__(self, body):
        self._body = body

    async def read(self):
        return self._body


class Answering(client.ApiClient):
    """A connection to a server that answers each request with `body`."""

    body = b"{}"

    async def call_api(self, *request, **options):
        return Answer(self.body)


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


async def test_a_token_that_cannot_be_read_is_such_an_error_too(connection):
    def refresh(configuration):
        raise FileNotFoundError("the file of the token")

    connection.configuration.api_key["BearerToken"] = "bearer old"
    connection.configuration.refresh_api_key_hook = refresh
    with pytest.raises(ClusterError, match="the file of the token"):
        await api_server.ApiServer(connection, instance="test").pool("prod", "chat")
