"""Benchmark suites in virtual time: traces, pools, settings and a table each. `__main__` is `tidegate bench`."""
