"""`tidegate weights URI --cache FOLDER`: one whole, checked copy of a model in a cache.

A copy that is there is used as it is, without asking its source. Files are fetched in parallel and checked one by one; an
attempt that was stopped goes on with the files that it had. Exit code 1 with `REASON: SENTENCE` for a failure.
"""

import argparse
import concurrent.futures
import errno
import importlib
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence

from tidegate_operator.weights import origin, weight_cache, weight_report, weight_source

AT_ONCE = 4
"""Files that are fetched at the same time."""
POLL_S = 1.0
TOLD_S = 5.0
"""Time between two lines of progress."""
ORIGINS = {"hf": ("hub_origin", "Hub"), "s3": ("bucket_origin", "Bucket")}
HUB_DEFAULTS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # the last line of the log is the progress
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_XET_CHUNK_CACHE_SIZE_BYTES": "0",  # a second copy, of up to 10 GB, on the pod's own disk
}
"""Variables of the hub's library, unless they are set. It reads them when it is imported."""
FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip
"""Errors of a disk that another attempt alone does not end."""
Reason = weight_report.Reason


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tidegate weights", description="Downloads the weights of a model into a cache that engines share."
    )
    made.add_argument("uri", metavar="URI", type=_downloadable, help="hf://OWNER/NAME[@REVISION] or s3://BUCKET/FOLDER")
    made.add_argument("--cache", type=pathlib.Path, required=True, metavar="FOLDER", help="the cache")
    made.add_argument("--endpoint", metavar="URL", help="a mirror of the hub, or an S3-compatible store")
    made.add_argument("--report", type=pathlib.Path, metavar="FILE", help="also write the reason of a failure here")
    return made


def _downloadable(text: str) -> weight_source.Source:
    try:
        source = weight_source.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if source.scheme not in weight_source.DOWNLOADED:
        raise argparse.ArgumentTypeError(f"{text!r} is not downloaded; write hf://OWNER/NAME or s3://BUCKET/FOLDER")
    return source


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    for name, value in HUB_DEFAULTS.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # the first process of a container ignores it otherwise
    try:
        download(options.uri, options.cache, endpoint=options.endpoint, say=_say)
    except weight_report.WeightsError as error:
        sys.stderr.write(f"{error}\n")
        if options.report:
            options.report.write_text(str(error))
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def download(
    source: weight_source.Source, cache: pathlib.Path, *, endpoint: str | None, say: Callable[[str], None]
) -> pathlib.Path:
    """The folder with a whole copy of `source`. Raises WeightsError."""
    copy = weight_cache.Copy(cache, source.folder(endpoint))
    try:
        if (size := copy.size()) is None:
            cache.mkdir(parents=True, exist_ok=True)
            with copy.locked(say):
                if (size := copy.size()) is None:
                    size = _filled(copy, _origin(source, endpoint), source, say)
    except OSError as error:
        raise _of_disk(error, cache, source) from error
    say(f"{weight_report.size(size)} are in the cache")
    return copy.folder


def _origin(source: weight_source.Source, endpoint: str | None) -> origin.Origin:
    module, name = ORIGINS[source.scheme]
    made: origin.Origin = getattr(importlib.import_module(f"{__package__}.{module}"), name)(source, endpoint)
    return made


def _filled(
    copy: weight_cache.Copy, place: origin.Origin, source: weight_source.Source, say: Callable[[str], None]
) -> int:
    """The size of the whole copy, which this process downloads, or another one that has no lock either and is faster."""
    try:
        return _fill(copy, place, source, say)
    except (OSError, weight_report.WeightsError):
        if (size := copy.size()) is None:
            raise
        copy.clean()
        return size


def _fill(
    copy: weight_cache.Copy, place: origin.Origin, source: weight_source.Source, say: Callable[[str], None]
) -> int:
    """Downloads all files; returns their size."""
    files = place.files()
    total = sum(file.size for file in files)
    copy.begin()
    copy.keep_only({file.path for file in files})
    begun = copy.written()
    missing = total - begun
    if missing > copy.free():
        raise _full(source, f"{weight_report.size(copy.free())} left and needs {weight_report.size(missing)} more")
    say(weight_report.progress(begun, total, 0))
    pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
    try:
        tasks = [pool.submit(_fetch, place, file, copy.partial) for file in sorted(files, key=lambda file: -file.size)]
        _watch(tasks, copy, total, say)
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure the files that have begun end, for the next attempt
    if not all(file.sha256 or file.git_sha1 for file in files):
        say(f"{source.uri} states no checksums for some files; their sizes are right")
    copy.finish({file.path: file.size for file in files})
    return total


def _fetch(place: origin.Origin, file: origin.RemoteFile, folder: pathlib.Path) -> None:
    target = folder / file.path
    if target.is_file() and file.difference(target) is None:
        return
    target.unlink(missing_ok=True)
    place.fetch(file, folder)
    if why := file.difference(target):
        target.unlink()
        raise weight_report.WeightsError(
            Reason.DIFFER,
            f"{file.path} {why}: the download tries again; if it differs again, upload the file again or correct its "
            "checksum",
        )


def _watch(
    tasks: Sequence["concurrent.futures.Future[None]"], copy: weight_cache.Copy, total: int, say: Callable[[str], None]
) -> None:
    """Waits for all tasks and tells the progress. Raises the first exception of a task."""
    waiting = set(tasks)
    told_at_s, told = time.monotonic(), copy.written()
    while waiting:
        done, waiting = concurrent.futures.wait(waiting, POLL_S, concurrent.futures.FIRST_EXCEPTION)
        for task in done:
            task.result()
        passed_s = time.monotonic() - told_at_s
        if passed_s >= TOLD_S and waiting:
            written = copy.written()
            say(weight_report.progress(written, total, (written - told) / passed_s))
            told_at_s, told = time.monotonic(), written


def _of_disk(error: OSError, cache: pathlib.Path, source: weight_source.Source) -> weight_report.WeightsError:
    if error.errno in FULL:
        return _full(source, "no space left")
    if error.errno not in UNWRITABLE:
        return weight_report.WeightsError(
            Reason.UNREACHABLE,
            f"{source.uri} cannot be downloaded into the cache {cache} ({error.strerror or error}): check the volume of "
            "model.cache and the network of the node; the download tries again",
        )
    return weight_report.WeightsError(
        Reason.UNWRITABLE,
        f"the cache {cache} cannot be written by user {os.getuid()} ({error.strerror}): give the folder to this user, or "
        "name another volume in model.cache",
    )


def _full(source: weight_source.Source, what: str) -> weight_report.WeightsError:
    return weight_report.WeightsError(
        Reason.DISK_FULL,
        f"the cache has {what} for {source.uri}: enlarge the volume of model.cache, or delete copies of other models "
        "from it",
    )


if __name__ == "__main__":
    sys.exit(main())
