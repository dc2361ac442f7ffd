"""What the operator logs of kopf: exceptions in our handlers, and nothing of its watches."""

import logging

import kopf
import pytest
from kopf._core.actions import loggers

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
