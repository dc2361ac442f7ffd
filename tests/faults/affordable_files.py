"""How many sockets may a test have open?"""

import contextlib
import resource

OTHER_FILES = 1000


def affordable(most: int, files_each: int) -> int:
    """Calls for which there are open files. A superuser may have more of them."""
    needed = files_each * most + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(needed, hard)))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(most, (files - OTHER_FILES) // files_each)
