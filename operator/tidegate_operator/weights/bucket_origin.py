"""Weights from an object store with the API of S3.

The credentials come from the usual variables (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`), or from the
identity that the cloud gives the pod's account. A file `SHA256SUMS` in the folder, as `sha256sum` writes it, states the
checksums. Without it only sizes can be compared: an object's ETag is no checksum of its content in every store.
"""

import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from obstore import exceptions, store

from tidegate_operator.weights import origin, weight_report, weight_source

SUMS = "SHA256SUMS"
RETRIED = timedelta(seconds=60)
"""Time after which a request that fails is not sent again."""
SILENCE = timedelta(seconds=60)
"""Longest time without a byte of the answer to a request; then the request fails."""
Reason = weight_report.Reason


class Bucket:
    """A folder of a bucket."""

    def __init__(
        self,
        source: weight_source.Source,
        endpoint: str | None,
        *,
        retried: timedelta = RETRIED,
        silence: timedelta = SILENCE,
    ) -> None:
        self._source = source
        self._where = (
            endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "the store"
        )
        anonymous = not any(os.environ.get(name) for name in _IDENTITIES)
        with self._translated():
            self._store = self._opened(endpoint, anonymous=anonymous, retried=retried, silence=silence)

    def _opened(
        self, endpoint: str | None, *, anonymous: bool, retried: timedelta, silence: timedelta
    ) -> store.S3Store:
        source = self._source
        return store.S3Store(
            source.location,
            prefix=source.detail or None,
            config={
                **({"endpoint": endpoint} if endpoint else {}),
                **({"skip_signature": True} if anonymous else {}),
            },
            client_options={"allow_http": True, "timeout": timedelta(hours=6), "read_timeout": silence},
            retry_config={
                "max_retries": 10,
                "retry_timeout": retried,
                "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2},
            },
        )

    def files(self) -> Sequence[origin.RemoteFile]:
        with self._translated():
            found = _without_markers({item["path"]: item["size"] for page in self._store.list() for item in page})
            sums = self._sums() if SUMS in found else {}
        if not found:
            raise self._missing()
        wanted = origin.needed({*found, *sums}) - {SUMS}
        if absent := sorted(wanted - found.keys()):
            raise weight_report.WeightsError(
                Reason.DIFFER,
                f"{self._source.uri} has no {absent[0]}, which its {SUMS} names: upload it first, or correct {SUMS}",
            )
        return [origin.RemoteFile(path=path, size=found[path], sha256=sums.get(path)) for path in sorted(wanted)]

    def fetch(self, file: origin.RemoteFile, folder: pathlib.Path) -> None:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.unfinished")
        with self._translated(), unfinished.open("wb") as content:
            if file.size:  # an empty file may be the marker of an empty folder, which the store has under another key
                for chunk in self._store.get(file.path).stream(min_chunk_size=origin.CHUNK_BYTES):
                    content.write(chunk)
        unfinished.rename(target)

    def _sums(self) -> Mapping[str, str]:
        """Checksums by path."""
        text = bytes(self._store.get(SUMS).bytes()).decode("utf-8-sig", errors="replace")
        sums: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            found = _SUM.fullmatch(line)
            if found:
                sums[found["name"]] = found["sha256"].lower()
            elif line.strip():
                raise weight_report.WeightsError(
                    Reason.DIFFER,
                    f"line {number} of {SUMS} in {self._source.uri} is no checksum with a name: write the file by "
                    f"sha256sum * > {SUMS}, and upload it again",
                )
        return sums

    def _missing(self) -> weight_report.WeightsError:
        return weight_report.WeightsError(
            Reason.NOT_FOUND,
            f"{self._where} has nothing at {self._source.uri}: correct the URI, or upload the model to this folder",
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self._missing() from error
        except exceptions.BaseError as error:
            why = str(error)
            if "404 Not Found" in why:  # a list has no exceptions of its own for the status
                raise self._missing() from error
            if isinstance(error, _DENIED) or any(text in why for text in _DENIALS):
                raise weight_report.WeightsError(
                    Reason.REFUSED,
                    f"{self._where} refuses the credentials for {self._source.uri}: put a valid AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY that may list and read it into the Secret of model.secretRef",
                ) from error
            raise weight_report.WeightsError(
                Reason.UNREACHABLE,
                f"{self._where} does not answer ({why.splitlines()[0][:200]}): check model.endpoint and the network of the "
                "node; the download tries again",
            ) from error


def _without_markers(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Sizes by path, without the empty objects by which consoles mark folders."""
    folders = {str(folder) for path in sizes for folder in pathlib.PurePosixPath(path).parents}
    return {path: size for path, size in sizes.items() if size or (path and path not in folders)}


_SUM = re.compile(r"(?P<sha256>[0-9A-Fa-f]{64}) [ *]?(?:\./)?(?P<name>\S|\S.*\S)\s*")
"""A line of `sha256sum`."""
_DENIED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_DENIALS = ("403 Forbidden", "401 Unauthorized", "Missing SecretAccessKey", "Missing AccessKeyId")
_IDENTITIES = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
"""Variables of which a pod with an identity has one. Without any, the bucket must be public."""
