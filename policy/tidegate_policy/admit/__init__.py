"""May a call come in, with which promises, and what happens when an engine fails it?

`promises` turns a client's claims into the deadline and targets that the call is given. `retries` decides whether a failed
call is tried on another engine. `outliers` decides which engine has failed too often.
"""
