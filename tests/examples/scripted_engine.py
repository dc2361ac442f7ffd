"""An engine with vLLM's HTTP API whose answers a test writes: a function from the request to the message."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

Script = Callable[[dict[str, Any]], dict[str, Any]]
"""The message for a request body, such as {"content": "hello"}."""
USAGE = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}


@contextlib.contextmanager
def serving(script: Script) -> Iterator[str]:
    """The engine at a free port; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._answer(json.dumps({"object": "list", "data": [{"id": "scripted", "object": "model"}]}))
            else:  # health and metrics
                self._answer('vllm:num_requests_running{engine="0"} 0\n', "text/plain")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = {"role": "assistant", "content": None, **script(body)}
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            choice = {"index": 0, "message": message, "finish_reason": reason}
            whole = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
            self._answer(json.dumps({**whole, "choices": [choice], "usage": USAGE}))

        def _answer(self, body: str, kind: str = "application/json") -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
