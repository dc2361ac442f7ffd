"""Kubernetes on this machine, without Docker: for the operator's tests and for `make e2e`.

`programs` finds the binaries that `tools/kubernetes/build` makes, `background_processes` starts and ends them, `pki` makes their
certificates. On these stand `control_plane` (a real API server, controllers, a scheduler, and nodes that kwok
pretends: ready in seconds, no root needed) and `node` (a real kubelet with real containers in a network namespace of
its own, which needs root). `images` builds container images for the latter.
"""
