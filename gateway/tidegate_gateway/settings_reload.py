"""Takes over the classes, tenants, workflow templates and policy of a settings file that has changed, without a restart.

The other settings take effect at the next start. A file that cannot be used changes nothing.
"""

import asyncio
import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping

from tidegate_gateway import gateway_settings, running_gateway, settings_file

logger = logging.getLogger("tidegate.gateway")

RELOAD_S = 5.0
"""Between two looks at the file."""
RELOADED = ("classes", "default_class", "tenants", "workflows", "policy")


class SettingsReload:
    """Watches the settings file of one gateway."""

    def __init__(
        self,
        path: pathlib.Path,
        gateway: running_gateway.Gateway,
        *,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._path = path
        self._gateway = gateway
        self._environment = environment
        self._raw: bytes | None = None
        self._read: gateway_settings.Settings | None = None
        """What the file had when it was last read. The gateway's own may differ: open files bound its connections."""

    async def run(self) -> None:
        """Reads the file again and again, until cancelled."""
        while True:
            await self._gateway.loops.step("settings", self.reload)
            await asyncio.sleep(RELOAD_S)

    async def reload(self) -> None:
        """Takes the settings that the file has now. Raises `BadSettings`."""
        raw = await asyncio.to_thread(settings_file.named, str(self._path), "--config")
        if raw == self._raw:
            return
        loaded = await asyncio.to_thread(gateway_settings.load, self._path, self._environment)
        before, earlier = self._gateway.settings, self._read or loaded
        self._raw, self._read = raw, loaded
        changes = {name: getattr(loaded, name) for name in RELOADED if getattr(loaded, name) != getattr(before, name)}
        others = [
            item.name
            for item in dataclasses.fields(loaded)
            if item.name not in RELOADED and getattr(loaded, item.name) != getattr(earlier, item.name)
        ]
        if others:
            logger.warning("the settings file has changed; %s take effect at the next start", ", ".join(others))
        if changes:
            self._gateway.take_over(dataclasses.replace(before, **changes))
            names = ", ".join("defaultClass" if name == "default_class" else name for name in changes)
            logger.info("the settings file has changed: %s", names)
