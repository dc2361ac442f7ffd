"""vLLM's entry points into Tidegate: `--scheduler-cls tidegate_engine.plugin.scheduler`, and a warning at start.

vLLM's engine core calls `scheduler` where it would construct its own class. `scheduler` picks Tidegate's class for the
platform (async or not) and starts the control server beside it. When Tidegate's scheduler cannot run, it gives vLLM its
own scheduler, because a server without Tidegate's scheduling is better than no server. Then the log and
`GetState.fallback_reason` give the reason, and the engine rejects SetPolicy.
"""

import importlib
import logging
import os
from typing import Any

from tidegate_control import control_contract, control_server, pool_token
from tidegate_engine import compat, engine_settings
from tidegate_policy import cost, policies
from tidegate_policy.engine import regulators, session_hold

log = logging.getLogger("vllm.tidegate")  # below vLLM's logger, which has the handlers


def register() -> None:
    """Entry point `vllm.general_plugins`, run in each of vLLM's processes. It warns, before the weights are loaded, that
    Tidegate's scheduler will not be used."""
    if engine_settings.PREFIX + "CONTROL_ADDRESS" in os.environ and (reason := compat.problem()):
        log.warning("Tidegate's scheduler will not be used: %s", reason)


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """vLLM's engine core calls this with its scheduler's arguments. Returns Tidegate's scheduler, or vLLM's own."""
    loaded = engine_settings.load()
    reason = compat.problem()
    built = None
    if reason is None:
        try:
            built = _ours(loaded, *args, **kwargs)
        except Exception as error:
            log.exception("Tidegate's scheduler failed to start")
            reason = f"it failed to start: {error}"
    if built is None:
        log.warning("FALLBACK: vLLM's own %s scheduler runs: %s", _policy(*args, **kwargs), reason)
        built = _stock(*args, **kwargs)
    governed: control_contract.ControlledEngine = (
        built if reason is None else control_contract.Fallback(reason, policy=_policy(*args, **kwargs))
    )
    _serve_control(built, governed, control_address(loaded.control_address, _vllm_config(*args, **kwargs)))
    return built


def control_address(base: str, vllm_config: Any) -> str:
    """The address of this engine's EngineControl. Each data-parallel rank of a host has an engine core of its own, so the
    port of a rank is the port of `base` plus the rank's number on its host."""
    rank = getattr(vllm_config.parallel_config, "data_parallel_rank_local", None) or 0
    host, colon, port = base.rpartition(":")
    return f"{host}{colon}{int(port) + rank}" if rank and port.isdigit() else base


def _serve_control(built: Any, governed: control_contract.ControlledEngine, address: str) -> None:
    """Serves EngineControl until vLLM shuts the scheduler down. An engine without a control server serves its clients."""
    try:
        serving = control_server.serve(
            governed,
            address=address,
            engine_version=importlib.import_module("vllm").__version__,
            token=pool_token.from_environment(os.environ),
        )
    except (control_server.CannotListen, pool_token.BadToken) as error:
        log.error("This engine runs without EngineControl. %s", error)
        return
    except Exception:
        log.exception("This engine runs without EngineControl: its server failed to start")
        return
    vllms_shutdown = built.shutdown

    def shutdown() -> None:
        serving.stop()
        vllms_shutdown()

    built.shutdown = shutdown
    log.info("EngineControl listens on %s, policy %s", serving.address, governed.state().policy)


def cost_model(profile: str) -> cost.CostModel | None:
    """The cost model of a profile by name or path; None for the empty name. Raises `tidegate_profiles.UnknownProfile`."""
    if not profile:
        return None
    import tidegate_profiles

    loaded = tidegate_profiles.find(profile)
    log.info("cost profile %s: %s", profile, tidegate_profiles.accuracy(loaded))
    return cost.from_mapping(loaded["cost"])


def _ours(loaded: engine_settings.Settings, *args: Any, **kwargs: Any) -> Any:
    from tidegate_engine import meters
    from tidegate_engine import scheduler as schedulers

    model = cost_model(loaded.profile) or policies.GENERIC_COST
    return schedulers.over(_vllms_class(*args, **kwargs))(
        *args,
        **kwargs,
        cost=model,
        policy=loaded.policy,
        regulators=regulators.create(engine_settings.names(loaded.regulators)),
        learn_cost=True,
        hold=session_hold.settings(float(loaded.hold)),
        meter=meters.prometheus(),
    )


def _stock(*args: Any, **kwargs: Any) -> Any:
    return _vllms_class(*args, **kwargs)(*args, **kwargs)


def _vllms_class(*args: Any, **kwargs: Any) -> Any:
    """The class that vLLM would choose without our flag. It chooses by the platform and by the kind of the model."""
    vllm_config = _vllm_config(*args, **kwargs)
    scheduler_config = vllm_config.scheduler_config
    if getattr(vllm_config, "diffusion_config", None) is not None:
        diffusion = importlib.import_module("vllm.v1.core.sched.diffusion_scheduler")
        return diffusion.DiffusionAsyncScheduler if scheduler_config.async_scheduling else diffusion.DiffusionScheduler
    ours, scheduler_config.scheduler_cls = scheduler_config.scheduler_cls, None
    try:
        return scheduler_config.get_scheduler_cls()
    finally:
        scheduler_config.scheduler_cls = ours


def _policy(*args: Any, **kwargs: Any) -> str:
    return str(_vllm_config(*args, **kwargs).scheduler_config.policy)


def _vllm_config(*args: Any, **kwargs: Any) -> Any:
    """The first of a vLLM scheduler's arguments."""
    return args[0] if args else kwargs["vllm_config"]
