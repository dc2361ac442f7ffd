"""Tidegate inside vLLM: a driver of the engine core, its start, and its control over gRPC.

In reading order: `compat` (the vLLM versions and attributes that the package uses), `vllm_labels` (a vLLM request as a
call), `request_queue` (vLLM's queue over the policy library's), `scheduler` (the scheduler mixin and its two classes),
`governor` (the commands that a scheduler accepts), `control` (these commands over gRPC), `plugin` (vLLM's entry points),
`engine_settings`, `vllm_server` (the program), `meters` (Prometheus metrics), `checkpoints` (small models from packages)
and `live_engine` (a real engine for tests).
"""
