"""Candidates that core makes of a plugin's: an adapter lets a contribution serve a workload that it refuses itself."""
