"""Fuzzers that follow the coverage of what reaches the gateway from outside (`python -m fuzzing --help`)."""
