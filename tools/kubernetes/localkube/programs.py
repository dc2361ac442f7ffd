"""Where are the Kubernetes programs? In the folder that `tools/kubernetes/build` prints; it builds what is
missing."""

import pathlib
import subprocess
import sys

BUILD = pathlib.Path(__file__).resolve().parent.parent / "build"


def for_tests() -> pathlib.Path:
    """The folder with what `control_plane` starts. The first call on a machine takes minutes."""
    return _build("--only", "test")


def for_a_node() -> pathlib.Path:
    """The folder with everything, kubelet and the rest included."""
    return _build()


def _build(*arguments: str) -> pathlib.Path:
    shown = []
    with subprocess.Popen([sys.executable, str(BUILD), *arguments], stdout=subprocess.PIPE, text=True) as build:
        for line in build.stdout or ():
            shown.append(line.rstrip("\n"))
            if not line.startswith("/"):
                print(line, end="", file=sys.stderr, flush=True)
    if build.returncode:
        raise RuntimeError(f"{BUILD} failed with status {build.returncode}")
    return pathlib.Path(shown[-1])
