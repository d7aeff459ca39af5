"""A simulated accelerator, for Hardpoint's tests. Its contributions are listed in ``hardpoint.toml``.

Its torch device type is ``sim``. Memory is the host's, behind addresses that the host cannot read; kernels are torch's
own for the CPU, run over that memory; the host learns of nothing before it waits. See ``csrc/`` for the rules.
"""
