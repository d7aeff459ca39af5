"""What carries out steps: executors and ranks, the runner, its sampler, its memory. Knows no policy."""
