"""Which order should be active, and was the last switch a mistake? (H-MAS 3.4.1, App. C)

`rules` proposes a policy from the QoS that engines delivered; `guards` decides whether the proposal, a bypass or a
rollback takes effect. Both are pure; the operator (and `tidegate up` without Kubernetes) supplies reports and time, and
carries the verdict to every engine.
"""
