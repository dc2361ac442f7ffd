"""Which weights does a URI name? The form of the URIs, and the folder that each has in a cache.

hf://OWNER/NAME[@REVISION]   the Hugging Face hub, or a mirror of it
s3://BUCKET/FOLDER           an object store with the API of S3
oci://IMAGE[#FOLDER]         an image that contains the weights as files; the kubelet pulls and mounts it
pvc://CLAIM[/FOLDER]         a PersistentVolumeClaim of the pool's namespace
hostpath:///FOLDER           a folder of the node
file:///FOLDER               a folder in the engine's container
"""

import hashlib
import re
from dataclasses import dataclass

DOWNLOADED = ("hf", "s3")
"""The schemes that `tidegate weights` downloads into a cache."""
DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    uri: str
    scheme: str
    location: str
    """OWNER/NAME, a bucket, an image, a claim, or an absolute folder."""
    detail: str
    """The revision (hf), or the folder below `location` without a slash at its ends (s3, oci, pvc); else empty."""

    def folder(self, endpoint: str | None) -> str:
        """Name of its folder in a cache. The same URI at another endpoint has another folder."""
        key = self.uri if endpoint is None else f"{endpoint} {self.uri}"
        words = re.sub("[^A-Za-z0-9]+", "-", self.uri).strip("-")[:80]
        return f"{words}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def parse(uri: str) -> Source:
    """Raises ValueError for a URI without a form from the list above."""
    scheme, separator, rest = uri.partition("://")
    if not separator or not rest.strip("/"):
        raise ValueError(f"{uri!r} names no weights")
    if scheme == "hf":
        location, _, detail = rest.partition("@")
        detail = detail or DEFAULT_REVISION
    elif scheme == "oci":
        location, _, detail = rest.partition("#")
    elif scheme in ("s3", "pvc"):
        location, _, detail = rest.partition("/")
    elif scheme in ("hostpath", "file"):
        location, detail = rest, ""
    else:
        raise ValueError(f"{uri!r} begins with no known scheme")
    return Source(uri=uri, scheme=scheme, location=location, detail=detail.strip("/"))
