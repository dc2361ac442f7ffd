"""A stream survives edits of its pool: one that a running gateway takes over, and one that replaces the gateways.

The operator and the API server are real. The test does the kubelet's part with processes: it starts gateways with the
settings that the operator has rendered, brings changes of the ConfigMap to their files, and ends the replaced gateway as a
pod ends. `make test` ends the stream after the edits, `make faults` after more than a minute.
"""

import asyncio
import concurrent.futures
import json
import os
import pathlib
import signal
import sys
import time
import urllib.error
import urllib.request

import pytest
import yaml
from localkube import background_processes

import fake_engine
import operator_doubles
from tidegate_policy import duration

IS_FULL = "TIDEGATE_FAULTS" in os.environ
STREAM_S = 75 if IS_FULL else 0
"""Least time of the stream."""
TOKENS, TOKEN_S = 4000, 0.25
"""Of the stream. It would take longer than the test: the engine hurries at the end."""


class Node:
    """Runs gateways of the pool as processes of this machine."""

    def __init__(self, kubectl, folder, engine_url):
        self._kubectl = kubectl
        self._engine_url = engine_url
        self._folder = folder
        self._processes = background_processes.Processes(folder)
        self.ports, self._pids = {}, {}

    def start_gateway(self, name):
        self.ports[name], admin = background_processes.free_ports(2)
        self.write_settings(name, admin)
        words = ["gateway", "--config", str(self._file(name))]
        self._start(name, *words, ready=f"http://127.0.0.1:{self.ports[name]}/ready")

    def write_settings(self, name, admin=None):
        """Brings the ConfigMap to the file of a gateway, with addresses of this machine."""
        rendered = yaml.safe_load(self.config_map())
        before = yaml.safe_load(self._file(name).read_text()) if admin is None else {}
        local = {"host": "127.0.0.1", "port": self.ports[name], "grpcPort": None, "adminPort": admin}
        listen = before.get("listen", {**rendered["listen"], **local, "metricsPort": None, "adminHost": "127.0.0.1"})
        engines = [{"url": self._engine_url, "name": "one"}]
        document = {**rendered, "listen": listen, "engines": engines, "services": [], "store": {}}
        fresh = self._file(name).with_suffix(".new")
        fresh.write_text(yaml.safe_dump(document))
        fresh.replace(self._file(name))

    def config_map(self):
        return self._kubectl("get", "configmap/chat-gateway", "-o", r"jsonpath={.data.gateway\.yaml}")

    def said(self, name):
        return self._processes.tail(name, lines=1000)

    def terminate(self, name):
        os.kill(self._pids[name], signal.SIGTERM)

    def runs(self, name):
        return pathlib.Path(f"/proc/{self._pids[name]}/cmdline").read_text() != ""  # a zombie has none

    def stop(self):
        self._processes.stop()

    def stream(self, name):
        """The events of a streamed answer of `TOKENS` tokens."""
        body = {"model": "demo", "prompt": "hello", "max_tokens": TOKENS, "stream": True}
        with self._ask(name, "/v1/completions", body) as answer:
            return [line for line in answer if line.startswith(b"data: ")]

    def status(self, name):
        """The status of a short call."""
        try:
            with self._ask(name, "/v1/completions", {"model": "demo", "prompt": "hello", "max_tokens": 1}) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def _ask(self, name, path, body):
        url = f"http://127.0.0.1:{self.ports[name]}{path}"
        headers = {"content-type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60)

    def _file(self, name):
        return self._folder / f"{name}.yaml"

    def _start(self, name, *words, ready):
        command = [sys.executable, "-m", "tidegate_cli.main", *words]
        self._pids[name] = self._processes.start(name, command, env={**os.environ})

        def answers():
            try:
                return urllib.request.urlopen(ready, timeout=5).status == 200
            except OSError:
                return False

        self._processes.wait(name, answers, timeout_s=120)


@pytest.mark.timeout(STREAM_S + 300)
async def test_a_stream_survives_an_edit_of_classes_and_one_that_replaces_the_gateways(
    kubectl, operator, tmp_path, eventually, figure
):
    async with fake_engine.engine(model="demo", tokens=TOKENS, token_s=TOKEN_S) as engine:
        node = Node(kubectl, tmp_path, engine.url)
        try:
            took_s = await asyncio.to_thread(edits_during_a_stream, kubectl, node, engine, eventually)
        finally:
            engine.token_s = 0
            await asyncio.to_thread(node.stop)
    figure("a stream across an edit of classes and a new gateway", f"{took_s:.0f} s", goal="whole", met=True)


def edits_during_a_stream(kubectl, node, engine, eventually):
    """Returns the time that the stream took."""
    kubectl("create", "-f", "-", body=operator_doubles.pool(nodePools=[{"name": "a"}]))
    eventually(lambda: "gateway.yaml" in kubectl("get", "configmap", "chat-gateway", "-o", "json", check=False))
    eventually(lambda: "chat-gateway" in kubectl("get", "deployments", "-o", "name"))
    node.start_gateway("old")

    def template():
        return json.loads(kubectl("get", "deployment/chat-gateway", "-o", "json"))["spec"]["template"]

    def edit(spec):
        before = node.config_map()
        kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps({"spec": spec}))
        eventually(lambda: node.config_map() != before)

    pods = template()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        streaming, began_at_s = threads.submit(node.stream, "old"), time.monotonic()
        eventually(lambda: engine.running)
        edit({"classes": [{"name": "interactive", "ttft": "1s"}], "tenants": [{"name": "search", "weight": 2}]})
        node.write_settings("old")
        eventually(lambda: "the settings file has changed: classes, tenants" in node.said("old"))
        assert template() == pods

        edit({"gateway": {"queue": {"maxRequests": 17}}})
        eventually(lambda: template() != pods)
        node.start_gateway("new")
        node.terminate("old")
        eventually(lambda: node.status("old") in (503, None))
        assert node.status("new") == 200
        time.sleep(max(0.0, began_at_s + STREAM_S - time.monotonic()))
        assert not streaming.done()
        took_s = time.monotonic() - began_at_s
        engine.token_s = 0
        events = streaming.result(60)
    assert events[-1] == b"data: [DONE]\n"
    assert len(events) >= TOKENS
    eventually(lambda: not node.runs("old"))
    drain_s = duration.seconds(yaml.safe_load(node.config_map())["timeouts"]["drain"])
    assert took_s < drain_s < template()["spec"]["terminationGracePeriodSeconds"]
    return took_s
