"""Portable kernels in Triton, for every platform that Triton compiles for.

Core never imports them by itself: a platform's plugin contributes those that serve its devices, in its manifest, each
with the requirement ``package = "triton..."``. All these modules keep the same rules:

* What changes from step to step is read from device memory, and grids follow from shapes alone, so that calls can be
  recorded by a platform's graph engine; no call waits for the device.
* Numbers are taken wider than they are stored, and rounded where the op's reference rounds.
* Integers that vary with the batch are not specialised, so that nothing is compiled in the middle of serving.
"""
