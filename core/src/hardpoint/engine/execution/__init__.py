"""Steps on devices: executors and ranks, the runner, graphs, sampling, memory. Knows no policy."""
