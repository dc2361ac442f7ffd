"""Which engine serves a call, and when does the gateway send it?

`dispatcher` is the gateway's state machine. `routing` holds the values that a dispatch rule reads. `rules` holds one rule a
file. `engine_table` knows which engines accept calls and how fast they are.
"""
