"""What the probes of the operator's pod are told."""

import asyncio
import threading
import urllib.error
import urllib.request

import pytest
from localkube import background_processes

from tidegate_operator import liveness, operator_metrics


class Clock:
    now_s = 5000.0

    def __call__(self):
        return self.now_s


def probe(port, path, timeout_s=30):
    """The status and the text of an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def ports():
    return background_processes.free_ports(2)


async def test_the_probes_show_for_how_long_the_api_server_has_been_silent(ports):
    clock = Clock()
    pulse = liveness.Pulse(clock)

    async def told(path):
        return await asyncio.to_thread(probe, ports[0], path)

    async with liveness.served(*ports, operator_metrics.OperatorMetrics(), pulse):
        clock.now_s += 12
        sentence = "ok: the API server has not granted a request for the Lease yet, since the start 12 s ago\n"
        assert await told("/readyz") == (200, sentence)
        pulse.answered()
        clock.now_s += liveness.READY_S
        assert await told("/readyz") == (200, "ok: the API server granted a request for the Lease last 30 s ago\n")
        clock.now_s += 1
        assert (await told("/readyz"))[0] == 503
        assert (await told("/healthz"))[0] == 200
        clock.now_s += liveness.LIVE_S
        assert await told("/healthz") == (
            503,
            "silent: the API server granted a request for the Lease last 631 s ago\n",
        )
        pulse.answered()
        assert ((await told("/readyz"))[0], (await told("/healthz"))[0]) == (200, 200)


async def test_an_error_is_an_answer_to_which_a_restart_is_no_remedy(ports):
    clock = Clock()
    pulse = liveness.Pulse(clock)
    async with liveness.served(*ports, operator_metrics.OperatorMetrics(), pulse):
        pulse.answered()
        clock.now_s += 2 * liveness.LIVE_S
        pulse.answered(403)
        clock.now_s += 2
        ready, live = [await asyncio.to_thread(probe, ports[0], path) for path in ("/readyz", "/healthz")]
        told = "the API server granted a request for the Lease last 1202 s ago"
        told += ", and answered one with HTTP status 403 2 s ago"
        assert ready == (503, f"silent: {told}\n")
        assert live == (200, f"ok: {told}\n")
        clock.now_s += liveness.LIVE_S
        assert (await asyncio.to_thread(probe, ports[0], "/healthz"))[0] == 503, "then nothing answers any more"


async def test_a_process_whose_first_request_is_never_answered_turns_red_too(ports):
    clock = Clock()
    async with liveness.served(*ports, operator_metrics.OperatorMetrics(), liveness.Pulse(clock)):
        clock.now_s += liveness.READY_S + 1
        assert (await asyncio.to_thread(probe, ports[0], "/readyz"))[0] == 503


async def test_an_event_loop_that_is_stuck_answers_no_probe(ports):
    async with liveness.served(*ports, operator_metrics.OperatorMetrics(), liveness.Pulse(Clock())):
        failed = []

        def ask():
            with pytest.raises(TimeoutError):
                probe(ports[0], "/healthz", timeout_s=1)
            failed.append(True)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()  # the event loop stands still meanwhile
        assert failed == [True]
        assert (await asyncio.to_thread(probe, ports[0], "/healthz"))[0] == 200
