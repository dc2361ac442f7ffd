"""A page in a headless Chromium, driven over the DevTools protocol."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_S = 60.0


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        """Console errors, exceptions and violations of the content's policy."""
        self.requests: list[str] = []
        """The addresses that the page asked for."""
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, START_S)

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.protocol !== 'about:'")

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it gives."""
        answer = await self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def text(self, element: str) -> str:
        """The text of the element with this id."""
        return str(await self.value(f"document.getElementById({json.dumps(element)})?.innerText ?? ''"))

    async def until(self, expression: str, within_s: float = 30.0) -> Any:
        """Polls until the expression is true; its value."""
        async with asyncio.timeout(within_s):
            while not (found := await self.value(expression)):
                await asyncio.sleep(0.05)
        return found

    async def screenshot(self) -> bytes:
        """The visible part of the page as a PNG."""
        return base64.b64decode((await self.ask("Page.captureScreenshot", format="png"))["data"])

    async def read(self) -> None:
        """Takes the messages of the browser until it ends."""
        taken: dict[str, Callable[[dict[str, Any]], None]] = {
            "Network.requestWillBeSent": lambda seen: self.requests.append(seen["request"]["url"]),
            "Runtime.exceptionThrown": lambda seen: self.errors.append(json.dumps(seen["exceptionDetails"])),
            "Log.entryAdded": lambda seen: self._log(seen["entry"]["level"], json.dumps(seen["entry"])),
            "Runtime.consoleAPICalled": lambda seen: self._log(seen["type"], json.dumps(seen["args"])),
        }
        async for message in self._socket:
            seen = json.loads(message.data)
            if "id" in seen:
                answer = self._answers.pop(seen["id"])
                if not answer.done():
                    if "error" in seen:
                        answer.set_exception(RuntimeError(seen["error"]["message"]))
                    else:
                        answer.set_result(seen["result"])
            elif seen["method"] in taken:
                taken[seen["method"]](seen["params"])

    def _log(self, level: str, entry: str) -> None:
        if level in ("error", "assert"):
            self.errors.append(entry)


@contextlib.asynccontextmanager
async def page(*, width: int = 1400, height: int = 1000, dark: bool = False) -> AsyncIterator[Page]:
    """A tab of a new browser with a profile of its own."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
        if os.geteuid() == 0:
            words.append("--no-sandbox")  # the browser refuses to run as root with its sandbox
        browser = await asyncio.create_subprocess_exec(
            PROGRAM,
            *words,
            f"--user-data-dir={folder}",
            "--remote-debugging-port=0",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"HOME": folder},
        )
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.ws_connect(await _socket(http, folder), max_msg_size=0) as ws,
            ):
                tab = Page(ws)
                reading = asyncio.create_task(tab.read())
                for domain in ("Page", "Network", "Runtime", "Log"):
                    await tab.ask(f"{domain}.enable")
                await tab.ask(
                    "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
                )
                features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
                await tab.ask("Emulation.setEmulatedMedia", features=features)
                yield tab
                reading.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                browser.terminate()
            await browser.wait()


async def _socket(http: aiohttp.ClientSession, folder: str) -> str:
    """The address of the tab's socket, once the browser has written its port."""
    port_file = pathlib.Path(folder) / "DevToolsActivePort"
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(OSError, IndexError, aiohttp.ClientError, StopIteration):
                port = port_file.read_text().splitlines()[0]
                async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
            await asyncio.sleep(0.05)
