"""Tidegate inside vLLM: the order of the waiting queue, the bounds of a step, and a report of what was delivered.

In reading order: `compat` (which vLLM this is written for), `labels` (a vLLM request as a call), `request_queue` (vLLM's
queue over the policy library's), `scheduler` (the two classes, which `tidegate_control` serves over gRPC), `plugin` (what
vLLM loads), `serve` (the program), `checkpoints` (small models from packages).
"""
