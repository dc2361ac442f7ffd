"""Who calls? The API key or the token in `Authorization` decides the tenant (docs/http.md, Authentication)."""

import asyncio

from tidegate_gateway import access_settings
from tidegate_gateway.callers import api_keys, caller, web_tokens
from tidegate_gateway.observe import background_loop

_TOKEN = "eyJ"
"""A token begins with a JSON object in base64; an API key of random characters does not."""


class Authentication:
    """The callers that one gateway knows."""

    def __init__(self, settings: access_settings.Auth) -> None:
        """Raises `BadSettings` for a file that cannot be used."""
        self.required = settings.required
        """Callers need a key or a token."""
        self._reload_s = settings.reload_s
        self._keys = None if settings.keys_file is None else api_keys.ApiKeys(settings.keys_file)
        self._tokens = None if settings.jwt.issuer is None else web_tokens.WebTokens(settings.jwt)

    @property
    def can_verify(self) -> bool:
        """Whether any caller can be known now: tokens need the public keys of their issuer."""
        return self._keys is not None or self._tokens is None or self._tokens.has_keys

    def caller_of(self, pairs: caller.Pairs) -> caller.Caller:
        """The caller whose key or token is in `Authorization`. Raises `GatewayError`."""
        given = [value for name, value in pairs if name == "authorization"]
        if len(given) != 1:
            raise caller.unauthenticated("send the header Authorization: Bearer and an API key or token, once")
        scheme, _, secret = given[0].partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise caller.unauthenticated("Authorization must be Bearer and an API key or token")
        if self._tokens is not None and (self._keys is None or secret.startswith(_TOKEN)):
            return self._tokens.caller_of(secret)
        if self._keys is None:
            raise caller.unauthenticated("this gateway knows no API keys")
        return self._keys.caller_of(secret)

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        """Reads the keys again when they change, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reload_keys(loops))
            group.create_task(self._refresh_tokens(loops))

    async def _reload_keys(self, loops: background_loop.BackgroundLoops) -> None:
        while self._keys is not None:
            await asyncio.sleep(self._reload_s)
            await loops.step("api-keys", self._keys.reload)

    async def _refresh_tokens(self, loops: background_loop.BackgroundLoops) -> None:
        while self._tokens is not None:
            await loops.step("token-keys", self._tokens.refresh)
            await self._tokens.until_next_refresh()
