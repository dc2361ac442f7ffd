"""Children are started, watched, and never left behind."""

import asyncio
import os
import pathlib
import socket
import sys

import pytest

from tidegate_cli import processes
from tidegate_cli.errors import Failed

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
    return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


async def test_stop_ends_every_child_also_one_that_ignores_sigterm(tmp_path: pathlib.Path) -> None:
    family = processes.Family(tmp_path)
    children = [await family.start("polite", SLEEP), await family.start("stubborn", STUBBORN, stop_s=0.2)]
    await family.stop()
    assert not any(alive(child.process.pid) for child in children)


async def test_a_child_that_ends_at_start_is_reported_with_its_last_words(tmp_path: pathlib.Path) -> None:
    family = processes.Family(tmp_path)
    child = await family.start("broken", [sys.executable, "-c", "raise SystemExit('no such model')"])

    async def never() -> bool:
        return False

    with pytest.raises(Failed, match=r"broken ended at start:\nno such model"):
        await processes.wait_until(child, never, patience_s=20)


async def test_first_death_names_the_child_that_died(tmp_path: pathlib.Path) -> None:
    family = processes.Family(tmp_path)
    await family.start("lives", SLEEP)
    dies = await family.start("dies", SLEEP)
    dies.process.kill()
    assert (await family.first_death()).name == "dies"
    await family.stop()


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


def test_a_port_in_use_is_one_sentence_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Failed, match=rf"port {port} on 127.0.0.1 cannot be used .*; choose another by --port"):
            processes.check_free("127.0.0.1", port, "--port")
