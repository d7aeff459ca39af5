"""Schemes and the kernels behind them; so far the plain one."""
