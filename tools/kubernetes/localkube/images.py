"""Container images without a Docker daemon: the project's own Dockerfiles, built by buildah on a Debian from
debootstrap.

Everything lives in one folder below the cache; a build whose inputs have not changed takes seconds. Needs root and
the Debian packages of `tools/kubernetes/packages.txt`.
"""

import os
import pathlib
import shutil
import subprocess
import tempfile

from localkube import leftovers

ROOT = pathlib.Path(__file__).resolve().parents[3]
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libnuma1")
"""The last is for vLLM's CPU build, which the real engine of the end-to-end test mounts."""
BASE = f"localhost/tidegate-base:{'-'.join(BASE_PACKAGES)}"


def folder() -> pathlib.Path:
    cache = pathlib.Path(os.environ.get("TIDEGATE_CACHE") or pathlib.Path.home() / ".cache/tidegate")
    return cache / "images"


def pause(programs: pathlib.Path, name: str) -> pathlib.Path:
    """The image of the pause container; returns its archive."""
    if not _exists(name):
        container = _buildah("from", "scratch")
        _buildah("copy", "-q", container, str(programs / "pause"), "/pause")
        _buildah("config", "--entrypoint", '["/pause"]', container)
        _buildah("commit", "-q", "--rm", container, name)
    return _archive(name)


def build(target: str, name: str) -> pathlib.Path:
    """A stage of the project's Dockerfile; returns its archive."""
    _ensure_base()
    _bud("--target", target, f"--build-arg=BASE={BASE}", "-t", name)
    return _archive(name)


def build_engine(name: str) -> pathlib.Path:
    """`engine-image/Dockerfile` over vLLM's CPU build instead of vLLM's own image; returns its archive (3 GB)."""
    _ensure_base()
    base = f"{BASE}-vllm"
    dockerfile = folder() / "vllm.Dockerfile"
    dockerfile.write_text(VLLM_BASE)
    _bud("--file", str(dockerfile), f"--build-arg=BASE={BASE}", "-t", base)
    _bud("--file", "engine-image/Dockerfile", f"--build-arg=BASE={base}", "-t", name)
    return _archive(name)


VLLM_BASE = """
ARG BASE
FROM ${BASE}
COPY pyproject.toml requirements/uv.txt /src/
RUN python3 -m venv /opt/vllm && /opt/vllm/bin/pip install --no-cache-dir --require-hashes -r /src/uv.txt \\
 && cd /src && SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt /opt/vllm/bin/uv pip install --no-cache \\
    --python /opt/vllm/bin/python -r pyproject.toml --extra engine-cpu
ENV PATH=/opt/vllm/bin:$PATH
"""
"""What vLLM's own image is to `engine-image/Dockerfile`: a python3 that has vLLM."""


def _bud(*arguments: str) -> None:
    # Packages come from wherever this machine's pip takes them; its certificates are lent for the build.
    lent = [f"--volume={path}:{path}:ro" for path in ("/etc/ssl/certs",) if pathlib.Path(path).is_dir()]
    _buildah("bud", "-q", "--layers", *lent, *arguments, str(ROOT))
    _buildah("rmi", "--prune", "--force")  # what this build has replaced


def release() -> None:
    """Ends what buildah keeps mounted between its calls, also after a build that failed."""
    _buildah("rm", "--all")
    leftovers.unmount_below(folder())


def _ensure_base() -> None:
    if _exists(BASE):
        return
    with tempfile.TemporaryDirectory(dir=folder()) as root:
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}", "bookworm", root]
        log = folder() / "debootstrap.log"
        with log.open("wb") as output:
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode:
                raise RuntimeError(f"debootstrap failed; its output is in {log}")
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(pathlib.Path(root, waste))
        container = _buildah("from", "scratch")
        _buildah("copy", "-q", container, root, "/")
        _buildah("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        _buildah("commit", "-q", "--rm", container, BASE)


def _archive(name: str) -> pathlib.Path:
    """A docker archive of the image as it is now."""
    identity = _buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", name)[:16]
    stem = name.rpartition("/")[2].replace(":", "-")
    archive = folder() / f"{stem}-{identity}.tar"
    if not archive.exists():
        for old in folder().glob(f"{stem}-*.tar"):
            old.unlink()
        partial = archive.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        _buildah("push", "-q", name, f"docker-archive:{partial}:{name}")
        partial.rename(archive)
    return archive


def _exists(name: str) -> bool:
    folder().mkdir(parents=True, exist_ok=True)
    return bool(_buildah("images", "-q", "--filter", f"reference={name}"))


def _buildah(*arguments: str) -> str:
    storage = ["--root", str(folder() / "store"), "--runroot", str(folder() / "store-run")]
    environment = {**os.environ, "STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}
    command = ["nice", "buildah", *storage, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"buildah {' '.join(arguments)}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout.strip()
