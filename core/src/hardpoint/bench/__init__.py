"""Benchmarks: each prints its result beside the roofline and a peer. Importing this imports nothing heavy."""
