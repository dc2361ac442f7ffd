"""Benchmark suites in virtual time: traces, pools, settings and a table each; `SUITES` is the one list of names."""

from tidegate_sim.suites import text2sql

SUITES = {"text2sql": text2sql}
