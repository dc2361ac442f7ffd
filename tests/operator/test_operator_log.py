"""The log of the operator: what comes of kopf, what text of others may do to it, and what happens if nobody reads it."""

import fcntl
import logging
import subprocess
import sys

import kopf
import pytest
from kopf._core.actions import loggers

import operator_doubles
from tidegate_operator import __main__ as program


@pytest.fixture(autouse=True)
def levels():
    before = {name: logging.getLogger(name).level for name in ("kopf", "kopf.objects")}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def test_an_exception_in_a_handler_is_logged_with_its_traceback(caplog):
    program.quieten_kopf()
    log = loggers.LocalObjectLogger(body={"metadata": {"name": "chat"}}, settings=kopf.OperatorSettings())
    try:
        {}["metadata"]
    except KeyError:
        log.exception("Handler failed")  # as kopf does, before it goes on
    assert "KeyError: 'metadata'" in caplog.text


def test_the_trouble_of_watches_is_not_logged_by_kopf(caplog):
    program.quieten_kopf()
    logging.getLogger("kopf.reactor").error("Watching failed")
    assert caplog.text == ""


FORGED = """
import logging
import grpc
from tidegate_control import control_client
from tidegate_operator import __main__ as program
program.begin_log("info")
trouble = control_client.CallFailed(grpc.StatusCode.INTERNAL, "no\\n2026-01-01 ERROR tidegate_operator: forged")
logging.getLogger("tidegate_operator").warning("%d engines did not accept policy %s: %s", 1, "edf", trouble)
try:
    raise trouble
except control_client.CallFailed:
    logging.getLogger("tidegate_operator").exception("a defect")
"""


def test_what_an_engine_answers_cannot_forge_a_line():
    ended = subprocess.run([sys.executable, "-c", FORGED], check=True, capture_output=True, text=True)
    warning, defect, *traceback = ended.stderr.splitlines()
    assert warning.endswith("INTERNAL: no\\x0a2026-01-01 ERROR tidegate_operator: forged")
    assert defect.endswith("ERROR tidegate_operator: a defect")
    assert traceback
    assert [line for line in traceback if not line.startswith("  | ")] == []


def test_an_operator_whose_log_nobody_reads_goes_on(kubectl, installed, namespace):
    command, env = installed.command("first", namespace, arguments=["--log-level=debug"])
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as process:
        try:
            fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
            for name in ("chat", "second"):
                kubectl("apply", "-f", "-", body=operator_doubles.pool(name))
                kubectl("wait", f"spool/{name}", "--for=condition=Ready", "--timeout=120s")
        finally:
            process.kill()
        said = process.stderr.read()
    assert said
    assert b"second" not in said, "the pipe was full before"
