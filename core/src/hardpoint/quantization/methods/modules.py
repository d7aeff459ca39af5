"""Names of modules in a ``quantization_config``, as the tools that write them mean them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of ``patterns`` (``modules_to_not_convert``) means the module ``name``.

    A pattern is a regular expression that matches from the start to the end of one of the name's parts
    (``model.layers.*.mlp``), or ends the name (``down_proj``): ``should_convert_module`` of Transformers 5.23.
    """
    return any(name.endswith(key) or re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", name) for key in patterns)
