"""A cache of weights: one folder for each source, which several pods and nodes may share.

    NAME                a whole, checked copy, with the list of its files in `MANIFEST`
    NAME.partial        a download that has not ended; the next attempt goes on with its files
    NAME.partial-...    the same without file locks, or a damaged copy that has lost its name
    NAME.lock           locked by the process that downloads

A copy appears under its name by one rename, so an engine never sees half of it. The lock saves a second download. Where
the file system has no locks, two pods may download at the same time; each then has a partial folder of its own. The first
that finishes deletes those of the others, of which some may belong to pods that do not exist any more.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import pathlib
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping

MANIFEST = ".tidegate-weights.json"
NOTES, UNFINISHED = ".cache", ".incomplete"
"""The folder in which the hub's library keeps notes of the files that it has, and the ending of a file there that it has
begun. No later attempt goes on with such a file."""
WAIT_S = 2.0
"""Time between two attempts to take the lock."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Copy:
    """The copy of one source in a cache."""

    def __init__(self, cache: pathlib.Path, name: str) -> None:
        self._cache = cache
        self.folder = cache / name
        self.partial = cache / f"{name}.partial"
        self._lock = cache / f"{name}.lock"

    def size(self) -> int | None:
        """Bytes of a whole copy; None if there is none, or if a file of it is missing or has another size. The check
        reads no file, so an engine with a copy starts at once."""
        try:
            files: Mapping[str, int] = json.loads((self.folder / MANIFEST).read_text())["files"]
            if all((self.folder / name).stat().st_size == size for name, size in files.items()):
                return sum(files.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return None

    @contextlib.contextmanager
    def locked(self, say: Callable[[str], None]) -> Iterator[None]:
        """Waits until no other process downloads this source."""
        with self._lock.open("a") as file:
            told = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not told:
                        say("waits for another pod, which downloads the same weights")
                    told = True
                    time.sleep(WAIT_S)
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
                    self.partial = self.partial.with_name(f"{self.partial.name}-{socket.gethostname()}")
                    break
            yield

    def begin(self) -> None:
        """Makes the partial folder. A damaged copy becomes the partial folder, so that its sound files stay."""
        if self.folder.exists() and not self.partial.exists() and self.size() is None:
            self.folder.rename(self.partial)
        self.partial.mkdir(parents=True, exist_ok=True)

    def keep_only(self, paths: Collection[str]) -> None:
        """Deletes what the partial folder has besides the files at these paths: an earlier attempt may have seen another
        commit of the source."""
        for folder, _, names in os.walk(self.partial, topdown=False):
            here = pathlib.Path(folder).relative_to(self.partial)
            for name in names:
                path = (here / name).as_posix()
                is_note = here.parts[:1] == (NOTES,) and not name.endswith(UNFINISHED)
                if path not in paths and not is_note:
                    (self.partial / path).unlink()
            if here.parts:
                with contextlib.suppress(OSError):  # it is not empty
                    (self.partial / here).rmdir()

    def written(self) -> int:
        """Bytes of the partial folder, with those of unfinished files."""
        total = 0
        for folder, _, names in os.walk(self.partial):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(folder, name)).st_size
        return total

    def free(self) -> int:
        return shutil.disk_usage(self.partial).free

    def finish(self, files: Mapping[str, int]) -> None:
        """Gives the partial folder, which holds these files by size, its name. A copy that another process without a lock
        finished first stays, because engines may read it."""
        if self.size() is None:
            (self.partial / MANIFEST).write_text(json.dumps({"files": dict(files)}, indent=1))
            try:
                self.partial.rename(self.folder)
            except OSError:
                if self.size() is None:
                    self._replace_damaged()
        self.clean()

    def _replace_damaged(self) -> None:
        aside = self.partial.with_name(f"{self.folder.name}.partial-damaged-{socket.gethostname()}")
        shutil.rmtree(aside, ignore_errors=True)
        self.folder.rename(aside)
        is_whole = Copy(self._cache, aside.name).size() is not None  # another process has just finished it
        (aside if is_whole else self.partial).rename(self.folder)

    def clean(self) -> None:
        """Deletes all partial folders. A process that still downloads to one of them then takes the whole copy."""
        shutil.rmtree(self.partial, ignore_errors=True)
        for folder in self._cache.glob(f"{glob.escape(self.folder.name)}.partial-*"):
            shutil.rmtree(folder, ignore_errors=True)
