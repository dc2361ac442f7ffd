"""TLS of the client ports. The certificate is read again when its files change, as cert-manager and the
kubelet change them, and new connections get the new one. A certificate that cannot be used changes nothing.
"""

import asyncio
import logging
import ssl
from typing import Literal

from cryptography import x509

from tidegate_gateway import access_settings, settings_file
from tidegate_gateway.observe import background_loop
from tidegate_gateway.settings_decoder import BadSettings

logger = logging.getLogger("tidegate.gateway")

Protocol = Literal["http/1.1", "h2"]
PROTOCOLS: tuple[Protocol, ...] = ("http/1.1", "h2")
"""Of the HTTP port, and of the ports for gRPC and an endpoint picker."""
Files = tuple[bytes, bytes]
"""The certificate chain and the private key, in PEM."""


class PortEncryption:
    """The certificate of one gateway."""

    def __init__(self, settings: access_settings.Tls) -> None:
        """Raises `BadSettings` for files that cannot be used."""
        self._settings = settings
        self._files: Files = (b"", b"")
        self.expires_at_s = 0.0
        """When the first certificate of the chain to expire does so, in seconds since 1970; 0 without TLS."""
        self._contexts: dict[Protocol, ssl.SSLContext] = {}
        """By the protocol that is offered; empty = plain text."""
        if settings.cert_file is not None and settings.key_file is not None:
            self._load(settings.cert_file, settings.key_file)

    @property
    def wanted(self) -> bool:
        return bool(self._contexts)

    def context(self, protocol: Protocol = "http/1.1") -> ssl.SSLContext | None:
        """For a listening socket; each handshake takes the newest certificate. None = plain text."""
        if not self.wanted:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols([protocol])

        def newest(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            connection.context = self._contexts[protocol]

        context.sni_callback = newest
        return context

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        """Reads the files again and again, until cancelled."""
        while self.wanted:
            await asyncio.sleep(self._settings.reload_s)
            await loops.step("tls", self.reload)

    async def reload(self) -> None:
        """Takes the certificate that the files have now. Raises `BadSettings`."""
        chain, key = self._settings.cert_file, self._settings.key_file
        if chain is not None and key is not None:
            await asyncio.to_thread(self._load, chain, key)

    def _load(self, chain: str, key: str) -> None:
        files = _read(chain, key)
        if files == self._files:
            return
        while True:
            try:
                contexts = {protocol: _context(chain, key, protocol) for protocol in PROTOCOLS}
                expires_at_s = min(
                    each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(files[0])
                )
            except (ssl.SSLError, ValueError, OSError) as error:
                raise BadSettings(
                    "tls.certFile and tls.keyFile must be a certificate chain and its key without a password, in PEM:"
                    f" {error}"
                ) from error
            before, files = files, _read(chain, key)
            if files == before:
                break  # they were not replaced while they were read
        if self._contexts:
            logger.info("the certificate of the client ports has changed")
        self._contexts, self._files, self.expires_at_s = contexts, files, expires_at_s


def _context(chain: str, key: str, protocol: Protocol) -> ssl.SSLContext:
    """Raises `OSError` and `ValueError` for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    context.load_cert_chain(chain, key, password="")
    return context


def _read(chain: str, key: str) -> Files:
    return settings_file.named(chain, "tls.certFile"), settings_file.named(key, "tls.keyFile")
