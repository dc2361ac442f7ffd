"""TLS for a port whose peers verify no certificate: the key and the certificate are made at the start, and stay in memory.

Such a certificate keeps listeners out and proves nothing. `port_encryption` has the certificates that clients verify.
"""

import datetime
import pathlib
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NAME = "tidegate"
LASTS = datetime.timedelta(days=3650)
EARLIER = datetime.timedelta(days=1)
"""The clocks of peers may be behind."""


def context(protocol: str) -> ssl.SSLContext:
    """For a listening socket whose peers speak this protocol (ALPN)."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols([protocol])
    with tempfile.TemporaryDirectory() as folder:  # ssl reads keys from files only
        file = pathlib.Path(folder) / "both.pem"
        file.touch(mode=0o600)
        file.write_bytes(_key_and_certificate())
        made.load_cert_chain(file)
    return made


def _key_and_certificate() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + LASTS)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, form, serialization.NoEncryption()) + certificate.public_bytes(pem)
