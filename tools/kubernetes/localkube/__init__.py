"""Kubernetes on this machine, without Docker: for the operator's tests and for `make e2e`.

`programs` finds the binaries that `tools/kubernetes/build` makes, `background_processes` starts and ends them, and `pki`
makes their certificates. `control_plane` is a real API server with controllers, a scheduler, and nodes that kwok simulates:
it is ready in seconds and needs no root. `node` is a real kubelet with real containers in a network namespace of its own,
which needs root. `images` builds container images for `node`.
"""
