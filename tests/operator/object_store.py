"""A double of an S3-compatible object store, and one of the Hugging Face hub, as far as a download uses them.

Standard library only, so that a pod can run this file too: `python object_store.py PORT BUCKET/NAME=FOLDER ...` serves
folders with their checksums.
"""

import abc
import hashlib
import http.server
import json
import pathlib
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from xml.sax import saxutils

COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEY, TOKEN = "a-key", "hf_valid"


class Store(http.server.ThreadingHTTPServer):
    """Serves `contents` by path below a bucket or a repository, and remembers what was asked."""

    daemon_threads = True

    def __init__(
        self, handler: type["Handler"], contents: dict[str, bytes], port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        super().__init__((host, port), handler)
        self.contents = contents
        self.damaged: dict[str, bytes] = {}
        """By path: what is sent in place of the content."""
        self.stated_sizes: dict[str, int] = {}
        self.gate = threading.Event()
        """Contents are sent while it is set."""
        self.gate.set()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that closes its connection is no fault
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def fetched(self) -> list[str]:
        """The paths of the contents that were sent."""
        return [word.removeprefix("GET ") for word in self.asked if word.startswith("GET ") and "?" not in word]


class Handler(http.server.BaseHTTPRequestHandler, abc.ABC):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        self.serve()

    @abc.abstractmethod
    def serve(self) -> None:
        """Answers a request whose path has been noted."""

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def content(self, path: str, **headers: str) -> None:
        if self.command == "GET":
            self.server.gate.wait()
        body = self.server.damaged.get(path, self.server.contents[path])
        asked = self.headers.get("range", "")
        if asked.startswith("bytes="):
            start, _, end = asked.removeprefix("bytes=").partition("-")
            part = body[int(start) : int(end) + 1 if end else None]
            self.answer(206, part, content_range=f"bytes {start}-{int(start) + len(part) - 1}/{len(body)}", **headers)
        else:
            self.answer(200, body, **headers)

    def log_message(self, *_: object) -> None:
        pass


class S3(Handler):
    """Paths are BUCKET/KEY; a key that ends with a slash marks a folder. A request that is signed must have the access key
    `KEY`; one without a signature is let in."""

    def serve(self) -> None:
        signed = self.headers.get("authorization", "")
        if signed and f"Credential={KEY}/" not in signed:
            self.answer(403, b"<Error><Code>InvalidAccessKeyId</Code><Message>unknown key</Message></Error>")
            return
        where = urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(where.path).lstrip("/"), dict(urllib.parse.parse_qsl(where.query))
        if "list-type" in query:
            self.list(path.rstrip("/"), query.get("prefix", ""))
        elif path in self.server.contents:
            self.content(path, last_modified="Mon, 23 Nov 2026 00:00:00 GMT", etag='"x"')
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>")

    def list(self, bucket: str, prefix: str) -> None:
        if not any(path.startswith(f"{bucket}/") for path in self.server.contents):
            self.answer(404, b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>")
            return
        keys = [path for path in sorted(self.server.contents) if path.startswith(f"{bucket}/{prefix}")]
        items = "".join(
            f"<Contents><Key>{saxutils.escape(path.removeprefix(f'{bucket}/'))}</Key><Size>{self.size(path)}</Size>"
            "<LastModified>2026-11-23T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for path in keys
        )
        text = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
        self.answer(200, text.encode(), content_type="application/xml")

    def size(self, path: str) -> int:
        return self.server.stated_sizes.get(path, len(self.server.contents[path]))


class Hub(Handler):
    """The repository owner/model is public, owner/private needs `TOKEN`, and owner/gated is closed to it."""

    def serve(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        words = path.removeprefix("api/models/").split("/")
        repository, name = "/".join(words[:2]), "/".join(words[4:])
        if token not in ("", TOKEN):
            self.answer(401, b"{}", X_Error_Message="Invalid credentials in Authorization header")
        elif repository == "owner/gated":
            self.answer(403, b"{}", X_Error_Code="GatedRepo")
        elif repository != "owner/model" and not (repository == "owner/private" and token):
            self.answer(401, b"{}")
        elif path.startswith("api/models/"):
            self.describe(repository, words[3])
        elif name in self.server.contents:
            content = self.server.contents[name]
            self.content(name, ETag=f'"{hash_of(name, content)}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(404, b"{}", X_Error_Code="EntryNotFound")

    def describe(self, repository: str, revision: str) -> None:
        if revision not in ("main", COMMIT):
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            return
        siblings = []
        for name, content in self.server.contents.items():
            found = hash_of(name, content)
            lfs = {"lfs": {"sha256": found, "size": len(content), "pointerSize": 1}} if len(found) == 64 else {}
            siblings.append({"rfilename": name, "size": len(content), "blobId": found, **lfs})
        body = {"id": repository, "sha": COMMIT, "siblings": siblings}
        self.answer(200, json.dumps(body).encode(), content_type="application/json")


def hash_of(name: str, content: bytes) -> str:
    """As the hub: the SHA-256 of weights, and the hash of a Git blob for other files."""
    if name.endswith((".safetensors", ".bin")):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running(handler: type[Handler], contents: dict[str, bytes]) -> Iterator[Store]:
    with Store(handler, contents) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield server
        finally:
            server.gate.set()
            server.shutdown()


def with_checksums(name: str, folder: pathlib.Path) -> dict[str, bytes]:
    """The files of a folder by their paths in the store, and SHA256SUMS."""
    files = {f"{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    sums = "".join(f"{hashlib.sha256(body).hexdigest()}  {path}\n" for path, body in files.items())
    return {f"{name}/{path}": body for path, body in {**files, "SHA256SUMS": sums.encode()}.items()}


if __name__ == "__main__":
    contents: dict[str, bytes] = {}
    for word in sys.argv[2:]:
        name, _, folder = word.partition("=")
        contents |= with_checksums(name, pathlib.Path(folder))
    Store(S3, contents, int(sys.argv[1]), "0.0.0.0").serve_forever()
