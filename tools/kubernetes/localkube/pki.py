"""Certificates and keys of one cluster, made by openssl in its folder: `ca`, then whatever it signs."""

import pathlib
import subprocess
from collections.abc import Sequence


def service_account_key(folder: pathlib.Path) -> pathlib.Path:
    key = folder / "service-accounts.key"
    _openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", key)
    return key


def authority(folder: pathlib.Path) -> pathlib.Path:
    """Makes the cluster's own authority; returns its certificate."""
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
        "-subj", "/CN=tidegate-local", "-keyout", folder / "ca.key", "-out", folder / "ca.crt",
    )  # fmt: skip
    return folder / "ca.crt"


def certificate(
    folder: pathlib.Path, name: str, *, subject: str, names: Sequence[str] = ()
) -> tuple[pathlib.Path, pathlib.Path]:
    """Makes NAME.crt and NAME.key signed by `authority`; `names` are its subjectAltNames, such as DNS:localhost."""
    crt, key, request = folder / f"{name}.crt", folder / f"{name}.key", folder / f"{name}.csr"
    _openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-subj", subject, "-keyout", key, "-out", request,
    )  # fmt: skip
    extensions = folder / f"{name}.extensions"
    extensions.write_text(f"subjectAltName={','.join(names)}\n" if names else "")
    _openssl(
        "x509", "-req", "-days", "30", "-in", request, "-out", crt, "-extfile", extensions,
        "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-CAcreateserial",
    )  # fmt: skip
    return crt, key


def _openssl(*arguments: str | pathlib.Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
