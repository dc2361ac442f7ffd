"""vLLM's offloading connector, which loads saved KV only where this is cheaper than to compute it again.

vLLM saves blocks to host memory as they fill, and loads every saved block that a request can use. This connector asks the
cost model of the engine's profile first (`tidegate_policy.engine.reload`). Start an engine with

    tidegate engine --profile NAME --kv-transfer-config '{"kv_connector": "ReloadConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "tidegate_engine.reload_connector",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592}}'

The profile must have `swap_s`; without it the connector behaves as vLLM's.
"""

import logging
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tidegate_engine import engine_settings, plugin
from tidegate_policy import policies
from tidegate_policy.engine import reload

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("vllm.tidegate")  # below vLLM's logger, which has the handlers


class ReloadConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM ships no types that mypy can follow
    """The connector. vLLM makes one for its scheduler, and one for each worker."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._cost = plugin.cost_model(engine_settings.load().profile) or policies.GENERIC_COST
        if role == KVConnectorRole.SCHEDULER and not self._cost.swap_s:
            log.warning("The cost profile has no swap_s; all KV that was saved is loaded")

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """The tokens after the first `num_computed_tokens` that vLLM is to load; None = ask again later."""
        saved, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not saved or reload.pays(
            self._cost, context_tokens=request.num_tokens, cached_tokens=num_computed_tokens, saved_tokens=saved
        ):
            return saved, asynchronous
        declined: tuple[int | None, bool] = self.connector_scheduler.get_num_new_matched_tokens(
            request, num_computed_tokens, max_num_new_tokens=0
        )
        return declined
