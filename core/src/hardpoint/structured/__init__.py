"""Structured output: grammars that every token of a request is held to.

``Trials`` says, where requests come in, whether a constraint can be compiled; ``Grammars`` compiles it where tokens are
committed; a ``StructureState`` follows one output and says which tokens may come next. llguidance does the work: it
names each keyword that it cannot enforce (``not``, ``uniqueItems``), counts the work of each step against a limit, and
imports in a tenth of a second, without torch. Importing this imports none.
"""

from hardpoint.structured.grammars import NICE, Grammars
from hardpoint.structured.state import StructureState
from hardpoint.structured.trials import Trials

__all__ = ["NICE", "Grammars", "StructureState", "Trials"]
