"""Functions with a backward pass of their own in a model's code, called without it: nothing here asks for gradients.

``torch.func``, by which passes are traced for compilation, refuses a ``torch.autograd.Function`` without
``setup_context``: https://pytorch.org/docs/stable/notes/extending.func.html.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from hardpoint.models.transformers_code.rebound import globals_used, rebind


class ForwardOnly:
    """Takes the place of ``function`` where code calls its ``apply``."""

    def __init__(self, function: type[Function]) -> None:
        self._function = function

    def apply(self, *args: Any) -> Any:
        """Return the result of ``function.forward``. Tensors that it saves for a backward pass are dropped."""
        return self._function.forward(FunctionCtx(), *args)


def call_forward_only(model: nn.Module) -> None:
    """Have the code of all modules of ``model`` call such functions without their backward pass."""
    for module in model.modules():
        found = {name: ForwardOnly(value) for name, value in globals_used(module).items() if _is_of_old_form(value)}
        if found:
            rebind(module, found)


def _is_of_old_form(value: Any) -> bool:
    is_function = isinstance(value, type) and issubclass(value, Function)
    return is_function and value.setup_context is Function.setup_context
