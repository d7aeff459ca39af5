"""The engine: request -> scheduler -> runner -> sampler -> output.

The scheduler knows tokens, pages and limits, not devices; the runner knows devices, not policies.
"""
