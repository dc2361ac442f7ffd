"""The decision core of Tidegate: which call, when, where.

Every function here takes values (time and randomness included) and returns a decision. The gateway, the vLLM plugin,
the operator and the simulator bring the clock, the sockets and the side effects. In reading order: `model` (the nouns),
`cost` (seconds), `budget` (deadlines), `policies` and `waiting_queue` (which call is next), `dispatch` (which engine),
`admit` (which calls may enter), `predict` (what a call will need), `gateway_core` and `engine` (the two state machines),
`qos` and `steer` (which policy should be active).
"""

import pathlib

try:
    import tidegate_compiled
except ImportError:  # `make compiled` was not run: Python runs the sources
    pass
else:
    tidegate_compiled.use(pathlib.Path(__file__).parent)
