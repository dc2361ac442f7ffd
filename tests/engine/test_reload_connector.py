"""The connector over vLLM's offloading connector, driven by vLLM's scheduler. A double plays the workers."""

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import torch
import yaml
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput

from tidegate_engine import reload_connector
from tidegate_engine.scheduler import TidegateScheduler
from tidegate_policy.cost import CostModel
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm

BLOCKS = 20
LIMITS = CostModel(step_s=0.02, prefill_s=1e-3, kv_tokens=BLOCKS * 16, max_batch=4, max_step_tokens=512)


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds a scheduler with the connector; the profile of the engine loads a token in `swap_s`."""

    def built(scheduler_class, swap_s):
        cost = {"step_s": LIMITS.step_s, "prefill_s": LIMITS.prefill_s, "swap_s": swap_s}
        profile = tmp_path / f"{swap_s}.yaml"
        profile.write_text(yaml.safe_dump({"source": "this test", "cost": cost}))
        monkeypatch.setenv("TIDEGATE_PROFILE", str(profile))

        def constructed(vllm_config, kv_cache_config, **kwargs):
            page = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
            size = page.page_size_bytes * BLOCKS
            tensor = KVCacheTensor(size=size, layers=["layer"], layer_stride=size, block_stride=size // BLOCKS)
            kv = KVCacheConfig(
                num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["layer"], page)]
            )
            vllm_config.kv_transfer_config = KVTransferConfig(
                kv_connector=reload_connector.ReloadConnector.__name__,
                kv_connector_module_path=reload_connector.__name__,
                kv_role="kv_both",
                kv_connector_extra_config={"cpu_bytes_to_use": 100 * size},
            )
            return scheduler_class(vllm_config=vllm_config, kv_cache_config=kv, **kwargs)

        return engine.build(constructed, LIMITS)

    return built


def served(scheduler, name, prompt_tokens, prefixes=()):
    """Serves one call alone; the prompt tokens that it computed, and the tokens that workers loaded for it."""
    scheduler.add_request(engine.request(name, prompt_tokens, {}, prefixes))
    computed = loaded = 0
    for _ in range(60):
        output = scheduler.schedule()
        jobs = output.kv_connector_metadata
        if name in output.num_scheduled_tokens:
            computed += output.num_scheduled_tokens[name]
        produced = engine.producing(output, scheduler.requests)
        model = engine.forward(output, produced, scheduler.requests, {name: 2})
        loading = {job.req_id for job in jobs.load_jobs.values()}
        if loading:
            loaded = scheduler.requests[name].num_computed_tokens
        model.kv_connector_output = KVConnectorOutput(
            finished_recving=loading,
            kv_connector_worker_meta=OffloadingWorkerMetadata(
                completed_jobs=dict.fromkeys([*jobs.load_jobs, *jobs.store_jobs], 1)
            ),
        )
        scheduler.update_from_output(output, model)
        if not scheduler.has_requests() and not jobs.store_jobs:
            break
    assert name not in scheduler.requests
    return computed, loaded


@pytest.mark.parametrize("scheduler_class", [Scheduler, TidegateScheduler])
@pytest.mark.parametrize(("swap_s", "reloads"), [(1e-6, True), (0.9e-3, True), (1.1e-3, False), (1.0, False)])
def test_a_returning_context_is_loaded_where_this_is_cheaper_than_the_prefill(build, scheduler_class, swap_s, reloads):
    scheduler = build(scheduler_class, swap_s)
    context = [(1, 160)]
    assert served(scheduler, "first turn", 160, context)[1] == 0
    assert served(scheduler, "a call that needs the memory", 300) == (301, 0)
    computed, loaded = served(scheduler, "second turn", 200, context)
    assert (loaded > 0) is reloads
    assert computed == (41 if reloads else 201)


def test_a_context_that_the_engine_still_holds_is_not_loaded(build):
    scheduler = build(TidegateScheduler, 1e-6)
    served(scheduler, "first turn", 160, [(1, 160)])
    assert served(scheduler, "second turn", 200, [(1, 160)]) == (41, 0)


def test_a_profile_without_a_swap_time_loads_all_as_vllm_does(build):
    scheduler = build(TidegateScheduler, 0.0)
    served(scheduler, "first turn", 160, [(1, 160)])
    served(scheduler, "a call that needs the memory", 300)
    assert served(scheduler, "second turn", 200, [(1, 160)])[0] == 41
