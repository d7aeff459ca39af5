"""Ranks in processes of their own, and the executors that feed, watch and end them."""
