"""How many engines should each node pool have?

`call_load` counts calls without naming an engine, and prices them for a kind of engine. `load_history` says what arrives
now and soon, `slo_headroom` how much room missed targets ask for, and `engine_sets` which engines carry the work for the
least money. `autoscaler` is the state machine that decides. All of it is pure: the operator and virtual time supply
observations.
"""
