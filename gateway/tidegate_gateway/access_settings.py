"""Who may call the gateway, and how are their connections encrypted? The groups `auth` and `tls` of the settings."""

import re
from dataclasses import dataclass, field

from tidegate_control import pool_token

LOOPBACK = re.compile(r"localhost|::1|127(\.\d{1,3}){3}")
_JWKS_URL = re.compile(r"https://[^/?#@\s]+[^#@\s]*|http://(localhost|\[::1\]|127(\.\d{1,3}){3})(:\d+)?/[^#@\s]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jwt:
    """Tokens of an identity provider (JSON Web Tokens, RFC 7519), in place of API keys or beside them."""

    issuer: str | None = None
    """The claim `iss` of the tokens; null = the gateway takes no tokens."""
    audience: str | None = None
    """The claim `aud` that a token must have: it is for this gateway and not for another service."""
    jwks_file: str | None = None
    """The public keys of the issuer as a JSON Web Key Set."""
    jwks_url: str | None = None
    """Its address, in place of a file; https, or http on loopback."""
    tenant_claim: str = "sub"
    """The claim that holds the tenant."""
    classes_claim: str | None = None
    """The claim that lists the classes that the caller may name; null = all. A call that names none is of the first one."""
    refresh_s: float = 300.0
    """Between two readings of the public keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """The authentication of callers (docs/http.md, Authentication)."""

    keys_file: str | None = None
    """A YAML file with the hashes of API keys and their tenants; null = callers need no key."""
    reload_s: float = 5.0
    """Between two looks at the file."""
    allow_unauthenticated: bool = False
    """Serve without keys on an address beyond loopback; the network or a proxy must then authenticate clients."""
    jwt: Jwt = field(default_factory=Jwt)
    pool_token: str | None = field(default=None, repr=False)
    """The token that this gateway shows to the control ports of engines. An admin port beyond loopback requires it. Better
    set by TIDEGATE_POOL_TOKEN than in the file."""

    @property
    def required(self) -> bool:
        """Clients need a key or a token of their own."""
        return self.keys_file is not None or self.jwt.issuer is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS of the client ports, HTTP and gRPC. The admin and metrics ports speak plain text."""

    cert_file: str | None = None
    """The certificate and its chain in PEM; null = the client ports speak plain text."""
    key_file: str | None = None
    """The private key of the certificate in PEM, without a password."""
    reload_s: float = 10.0
    """Between two looks at the files. New connections get a changed certificate."""


def is_open(auth: Auth, host: str) -> bool:
    """Whether client ports on `host` would serve anybody, and nothing says that they may."""
    return not auth.required and not auth.allow_unauthenticated and not LOOPBACK.fullmatch(host)


def problems(auth: Auth, tls: Tls, *, host: str) -> list[str]:
    """What is wrong with these groups, for a gateway whose client ports listen on `host`."""
    found = []
    if is_open(auth, host):
        found.append(
            f"listen.host {host!r} lets other machines call, and callers need no API key: set auth.keysFile or auth.jwt,"
            " or auth.allowUnauthenticated: true if the network or a proxy authenticates clients"
        )
    jwt = auth.jwt
    sources = [jwt.jwks_file, jwt.jwks_url]
    if jwt.issuer is None and (jwt.audience, *sources) != (None, None, None):
        found.append("auth.jwt.issuer is required for tokens: set it to the claim iss of the tokens")
    if jwt.issuer is not None and jwt.audience is None:
        found.append("auth.jwt.audience is required: tokens of the same issuer for other services must not count here")
    if jwt.issuer is not None and sources.count(None) != 1:
        found.append("auth.jwt needs one of jwksFile and jwksUrl")
    if jwt.jwks_url is not None and not _JWKS_URL.fullmatch(jwt.jwks_url):
        found.append("auth.jwt.jwksUrl must start with https:// and name a host (http:// on loopback only)")
    found += [
        f"{name} must be at least 10ms"
        for name, period_s in (
            ("auth.reload", auth.reload_s), ("auth.jwt.refresh", jwt.refresh_s), ("tls.reload", tls.reload_s)
        )
        if period_s < 0.01
    ]  # fmt: skip
    if auth.pool_token is not None:
        try:
            pool_token.checked(auth.pool_token, "auth.poolToken")
        except pool_token.BadToken as error:
            found.append(str(error))
    if (tls.cert_file is None) != (tls.key_file is None):
        found.append("tls needs both certFile and keyFile, or none of them")
    return found
