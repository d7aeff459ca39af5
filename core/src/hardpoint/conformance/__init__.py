"""The conformance kit: whether a plugin's contributions are right, shown case by case against core's references.

A **trial** is one case of one contribution with the checks to make on it (``trials.py``). **Generators**, one per
family or per op or layer, make trials from what a contribution claims (``families/``, ``generators.py``). ``kit.py``
says what a run consists of, ``isolation.py`` runs each contribution in a process of its own (``processes.py``,
``nursery.py``, ``worker.py``), and ``certify.py`` keeps what came out in a certificate (``certificate.py``;
``certificate_file.py`` is what its file holds).

Importing this package imports no torch.
"""
