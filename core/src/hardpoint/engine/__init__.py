"""The engine: request -> scheduler -> runner -> sampler -> output.

``core.py`` is the engine core, ``llm.py`` and ``async_engine.py`` are the doors, and ``client.py`` and ``control.py``
what they ask of a core. The rooms, each using only those before it:

* ``scheduling/``: requests, pages and steps; knows no device.
* ``processes/``: processes of the engine's own, and calls between them.
* ``execution/``: executors, ranks, and the runner with its sampler and memory; knows no policy.
* ``remote/``: a core in a process or thread of its own, behind the same client.
* ``frontend/``: from prompts to requests, from tokens to text.
"""
