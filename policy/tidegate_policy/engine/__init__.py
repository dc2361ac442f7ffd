"""The engine core: the decisions inside one engine, without clock, threads or vLLM.

`step` holds the values: the facts of a step go in, the plan of the next step comes out. `bounds` makes each plan safe.
`engine_core` is the state machine; vLLM's scheduler mixin and the real-time engine double drive it. `engine_status` holds
the answers to the operator. `regulators` shape plans.
"""
