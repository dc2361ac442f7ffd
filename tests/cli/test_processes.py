"""Children are started, watched, and never left behind."""

import asyncio
import os
import pathlib
import random
import socket
import sys

import pytest

from tidegate_cli import processes
from tidegate_cli.command_errors import Failed

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)",
]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    """Waits until a killed process has ended; it is no child of this process."""
    async with asyncio.timeout(10):
        while alive(pid):
            await asyncio.sleep(0.01)


async def test_stop_ends_every_child_even_one_that_ignores_sigterm(tmp_path: pathlib.Path) -> None:
    family = processes.Family(tmp_path)
    children = [await family.start("polite", SLEEP), await family.start("stubborn", STUBBORN, stop_s=0.2)]
    await family.stop()
    assert not any(alive(child.process.pid) for child in children)


async def test_a_child_that_ends_at_start_is_reported_with_the_end_of_its_log(tmp_path: pathlib.Path) -> None:
    family = processes.Family(tmp_path)
    child = await family.start("broken", [sys.executable, "-c", "raise SystemExit('no such model')"])

    async def never() -> bool:
        return False

    with pytest.raises(Failed, match=r"broken ended at start:\nno such model"):
        await processes.wait_until(child, never, patience_s=20)


async def test_a_child_that_ends_at_start_and_writes_nothing_is_reported_with_its_status(
    tmp_path: pathlib.Path,
) -> None:
    family = processes.Family(tmp_path)
    child = await family.start("silent", [sys.executable, "-c", "raise SystemExit(3)"])

    async def never() -> bool:
        return False

    with pytest.raises(
        Failed, match=r"silent ended at start:\nit ended with exit code 3; its log is .*, which is empty"
    ):
        await processes.wait_until(child, never, patience_s=20)


PARENT = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(600)"


async def test_the_descendants_of_a_crashed_child_are_killed_before_it_restarts(tmp_path: pathlib.Path) -> None:
    family = processes.Family(tmp_path)
    child = await family.start("engine", [sys.executable, "-c", PARENT, *SLEEP])

    def words() -> list[str]:
        return child.log.read_text().split()

    for runs, end in enumerate((family.restart, lambda _: family.stop()), 1):

        async def both_run(runs: int = runs) -> bool:
            return len(words()) == 2 * runs

        await processes.wait_until(child, both_run, patience_s=20)
        grandchild = max(int(word) for word in words()[-2:] if word != "up")
        child.process.kill()
        await child.process.wait()
        assert alive(grandchild)
        child = await end(child) or child
        await gone(grandchild)


async def test_first_crash_returns_the_child_that_crashed(tmp_path: pathlib.Path) -> None:
    family = processes.Family(tmp_path)
    await family.start("lives", SLEEP)
    dies = await family.start("dies", SLEEP)
    dies.process.kill()
    assert (await family.first_crash()).name == "dies"
    await family.stop()


async def test_each_run_begins_a_new_log_and_keeps_the_previous_one(tmp_path: pathlib.Path) -> None:
    for said in ("first", "second", "third"):
        family = processes.Family(tmp_path)
        child = await family.start("speaks", [sys.executable, "-c", f"print({said!r})"])
        await child.process.wait()
    assert (tmp_path / "speaks.log").read_text() == "third\n"
    assert (tmp_path / "speaks.log.1").read_text() == "second\n"


async def test_a_restarted_child_keeps_its_log_its_environment_and_its_position(tmp_path: pathlib.Path) -> None:
    family = processes.Family(tmp_path)
    command = [sys.executable, "-c", "import os; print(os.environ['SAID'])"]
    dead = await family.start("speaks", command, environment={"SAID": "hello"})
    last = await family.start("gateway", SLEEP)
    await dead.process.wait()
    again = await family.restart(dead)
    await again.process.wait()
    assert again.log.read_text() == "hello\nhello\n"
    assert family.names == ["speaks", last.name]
    await family.stop()


async def test_kill_ends_all_children_and_their_descendants_at_once(tmp_path: pathlib.Path) -> None:
    family = processes.Family(tmp_path)
    parent = f"import subprocess, sys; print(subprocess.Popen({STUBBORN!r}).pid, flush=True); sys.stdin.read()"
    child = await family.start("stubborn", [*STUBBORN], stop_s=600)
    other = await family.start("parent", [sys.executable, "-c", parent + "; import time; time.sleep(600)"], stop_s=600)
    async with asyncio.timeout(30):
        while not other.log.read_text().strip():
            await asyncio.sleep(0.02)
    grandchild = int(other.log.read_text().split()[0])  # which may have said something itself by now
    family.kill()
    await family.stop()
    assert not alive(child.process.pid)
    async with asyncio.timeout(10):
        while alive(grandchild):
            await asyncio.sleep(0.02)


async def test_children_die_with_a_parent_that_is_killed(tmp_path: pathlib.Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from tidegate_cli import processes\n"
        "async def main():\n"
        f"    family = processes.Family(pathlib.Path({str(tmp_path)!r}))\n"
        f"    child = await family.start('child', {SLEEP!r})\n"
        "    print(child.process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert alive(child)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(10):
        while alive(child):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_of_another_machine_is_named_with_its_own_option(host: str) -> None:
    with pytest.raises(Failed, match=r"is no address of this machine .* choose another by --host"):
        processes.check_free(host, processes.free_port(), "--port")


def test_a_port_in_use_gives_one_sentence_with_the_option_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Failed, match=rf"port {port} on 127.0.0.1 cannot be used .*; choose another by --port"):
            processes.check_free("127.0.0.1", port, "--port")


@pytest.mark.skipif(sys.platform != "linux", reason="ports are claimed by abstract socket names")
def test_a_port_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (processes.free_port() for _ in range(3))
    while processes._claims:
        os.close(processes._claims.pop())
    numbers = iter([one, one, two, one, two, three])
    monkeypatch.setattr(random, "randrange", lambda *bounds: next(numbers))
    assert [processes.free_port() for _ in range(3)] == [one, two, three]
