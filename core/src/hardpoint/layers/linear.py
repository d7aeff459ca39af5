"""Linear layer: named row blocks of one weight, multiplied by the kernel that the selector chose."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.base import PluggableLayer, checked_weights
from hardpoint.layers.lora import LinearAdapters
from hardpoint.numerics import travels
from hardpoint.ops.base import by_tokens
from hardpoint.plugin_host.blame import blame, construct, misbehaved
from hardpoint.quantization.merging import collapse_parts
from hardpoint.selection import Plan
from hardpoint.selection.switches import Switch, SwitchError
from hardpoint_plugin_api import (
    ForwardStep,
    LinearArgs,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    Quantized,
    Scheme,
    WeightSlot,
    weight_slots,
)


class Linear(PluggableLayer, name="linear"):
    """``y[T, out] = x[T, in] @ weight[out, in].T + bias[out]``; this rank's rows or columns of it, where it is divided.

    Slots: those of the scheme that the context's quantization gives it (weight alone where it is not quantized), and
    bias where there is one. Where the parts' schemes do not let them share a weight, it has none: each part is a
    linear layer of its own, under its own name. Where the engine serves LoRA adapters, each token's is added, in the
    model's dtype whatever the weight's is; input is not taken in quantized form then.
    """

    def __init__(self, ctx: Context, args: LinearArgs) -> None:
        super().__init__(ctx)
        self.args, self.dtype = args, dtype_name(ctx.dtype)
        self.scheme: Scheme | None = ctx.quantization.linear(ctx.path, args, self.dtype)
        self.kernels: list[LinearKernel] = []
        self._apart: tuple[Linear, ...] = ()
        self._bias: torch.Tensor | None = None
        if self.scheme is None:
            self._apart = tuple(
                Linear(ctx.child(part), replace(args, parts=((part, rows),), row_shards=args.row_shards[i : i + 1]))
                for i, (part, rows) in enumerate(args.parts)
            )
            for (part, _), layer in zip(args.parts, self._apart, strict=True):
                self.add_module(part, layer)
            return
        workload = LinearWorkload(
            dtype=self.dtype,
            in_features=args.own_in_features,
            out_features=sum(rows for _, rows in args.own_parts),
            spec=self.scheme.pair,
        )
        plan = ctx.select(workload, binding=args.kind != "lm_head")  # a head may have a format of its own
        self._use(plan, self._kernels_of(ctx, plan))
        if ctx.selector.postponed(plan.workload):
            layout = plan.layout
            ctx.switches.add(plan.workload, lambda other: self._switch(ctx, other, layout))
        if ctx.config.num_adapters and args.kind == "linear":
            self.adapters = LinearAdapters(ctx.child("adapters"), args)
        wanted = {k.input_spec for k in self.kernels}
        if len(wanted) == 1 and self.adapters is None:  # a form is chosen before a step's size is known
            (self.input_spec,) = wanted

    def _kernels_of(self, ctx: Context, plan: Plan) -> list[LinearKernel]:
        """The kernel of each range of ``plan``."""
        kernels = [construct(e.offer, ctx.load(e.offer), LinearKernel, ctx, plan.workload) for e in plan.entries]
        for entry, kernel in zip(plan.entries, kernels, strict=True):
            ctx.kernel_calls.attach(entry.offer, kernel, {"apply": self._product})
            if kernel.input_spec is not None and not travels(kernel.input_spec):
                raise misbehaved(
                    entry.offer,
                    f"wants its input as {kernel.input_spec}; what an op rounds in passing has one level of scales, "
                    "dynamic, each of a row's own, no zero points, and elements that lie one by one",
                )
        return kernels

    def _use(self, plan: Plan, kernels: list[LinearKernel]) -> None:
        """Multiply by ``kernels`` of ``plan`` from now on."""
        self._offer, self.kernels = plan.entries[0].offer, kernels
        limits = [e.range.max for e in plan.entries]
        self._matmul = by_tokens(limits, [k.apply for k in kernels], lambda call: call.x.shape[0])

    def _switch(self, ctx: Context, plan: Plan, layout: str) -> Switch:
        """A function that switches to another plan, with the weight as it lies. Raises SwitchError."""
        if plan.layout != layout:
            raise SwitchError(f"{plan.entries[0].offer.contribution} has its weight in another layout")
        kernels = self._kernels_of(ctx, plan)
        if self.input_spec is not None and {k.input_spec for k in kernels} != {self.input_spec}:
            raise SwitchError(f"{plan.entries[0].offer.contribution} takes its input in another form")
        return partial(self._use, plan, kernels)

    def declare(self) -> dict[str, WeightSlot]:
        if self.scheme is None:
            return {}
        args, parts = self.args, self.args.own_parts
        slots = weight_slots(self.scheme, parts, args.own_in_features)
        if not self.scheme.stored:  # what a scheme stores is cut as its tensors say, before it is read
            weight = slots["weight"]
            columns = (args.column_shard,) if args.column_shard else ()
            slots["weight"] = replace(weight, shard_axis=1 if columns else 0, shards=columns or args.row_shards)
        if args.bias:
            size, named = sum(rows for _, rows in parts), parts if len(parts) > 1 else ()
            slots["bias"] = WeightSlot((size,), self.dtype, 0, named, shards=args.row_shards)
        return slots

    def prepare(self) -> None:
        if self.scheme is None:
            return
        bias, columns = self.weights.pop("bias", None), self.args.column_shard
        self._bias = None if columns is not None and columns.rank else bias
        weights = collapse_parts(self.weights, self.path)
        with blame(self._offer):
            packed = self.kernels[0].prepack(weights)
        self.weights = checked_weights(self._offer, packed)

    def release(self) -> None:
        super().release()
        self._bias = None

    def allocate(self, x: torch.Tensor | Quantized, step: ForwardStep) -> torch.Tensor:
        rows = x.data if isinstance(x, Quantized) else x
        features = sum(size for _, size in self.args.own_parts)
        return torch.empty(rows.shape[0], features, dtype=getattr(torch, self.dtype), device=rows.device)

    def forward(self, x: torch.Tensor | Quantized, step: ForwardStep) -> torch.Tensor:
        """[T, in] -> [T, out], this rank's features of both.

        Where ranks divide the input features (``column_shard``), the result is this rank's partial sum, and the caller
        sums over the ranks.
        ``x`` may be quantized in the form of ``input_spec``.
        """
        if self._apart:
            return torch.cat([part(x, step) for part in self._apart], dim=-1)
        if isinstance(x, Quantized):
            return self._matmul(LinearCall(x.data, self.weights, self._bias, x.scale))
        y = self._matmul(LinearCall(x, self.weights, self._bias))
        if step.adapters is not None and self.adapters is not None:
            self.adapters.add_to(y, x, step.adapters)
        return y

    def _product(self, call: LinearCall) -> torch.Tensor:
        """A product like the one that a kernel must return for ``call``, without values."""
        features = sum(rows for _, rows in self.args.own_parts)
        return torch.empty(call.x.shape[0], features, dtype=getattr(torch, self.dtype), device="meta")

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` [T] of the weight, [T, in]: a tied embedding's look-up."""
        return self.kernels[0].rows(self.weights, ids)
