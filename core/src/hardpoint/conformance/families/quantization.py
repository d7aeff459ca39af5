"""Trials of quantization methods: what they make of a checkpoint, loaded as the engine loads it.

Methods that read checkpoints are given samples of their formats: core's own in ``quantization_samples.py``; a plugin
that brings a format returns ``QuantizationTrials`` with its own samples from ``hardpoint_conformance``. Methods that
quantize while loading are given plain weights, and held to what rounding by their spec can cost at most.

Axes: N rows (out), K columns (in).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from hardpoint.conformance.families.quantization_samples import SAMPLES, Sample
from hardpoint.conformance.families.rounding_bound import rounding_bound
from hardpoint.conformance.memory import equal_bits
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.dtypes import dtype_name, dtype_of
from hardpoint.ops.comparison import Fault
from hardpoint_plugin_api import (
    CheckpointError,
    Contribution,
    Dim,
    HardpointError,
    MethodRequest,
    Module,
    QuantizationMethod,
    QuantizationWorkload,
    Reason,
    Scheme,
    StoredTensor,
    TensorInfo,
    dequantize,
    weight_slots,
)

_ONLINE = "_online"
_NAME = "model.layers.0.mlp.up_proj"
_EXPERT_NAME = "model.layers.0.mlp.experts.0.up_proj"
_PLAIN = ("float32", "float16", "bfloat16", "float64")
_WEIGHTS = ((96, 64), (33, 192), (256, 128), (5, 384), (640, 64))
_ODD = ((8, 96), (8, 100))
"""Three groups of 32 columns, and a width that no group divides. A method of larger groups may refuse them."""
_TALL = 640
"""At least as many rows has one matrix of each sample, beside those of the sample's shapes."""
_TINY = {"float16": 2.0**-10}, 2.0**-20
"""How much smaller than the others one row is, by dtype and for all others."""


class QuantizationTrials:
    """The generator of the family ``quantization``. ``samples`` are by the name that a config gives the method."""

    family = "quantization"

    def __init__(self, samples: Mapping[str, Sequence[Sample]] = SAMPLES) -> None:
        self._samples = samples

    def serves(self, contribution: Contribution) -> bool:
        """Whether there are samples of the format, or it needs none."""
        return contribution.of in self._samples or str(contribution.of).endswith(_ONLINE)

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Each sample in each shape and dtype; of what quantizes while loading, each set of options instead."""
        if reason := subject.refuses(QuantizationWorkload(of=subject.offer.contribution.of)):
            yield Trial("method", unsupported=reason)
            return
        dtypes = [dtype for dtype in _PLAIN if dtype in subject.site.platform.info.dtypes]
        if getattr(subject.target, "online", False):
            for options, (rows, columns), dtype in itertools.product(_options(subject), (*_WEIGHTS, *_ODD), dtypes):
                named = ",".join(f"{k}={v}" for k, v in options.items()) or "no-options"
                probe = OnlineProbe(subject, plan, f"{named}/{rows}x{columns}/{dtype}", options, (rows, columns), dtype)
                refusal = probe.refusal() if (rows, columns) in _ODD else None
                yield Trial(probe.title, () if refusal else probe.checks(), unsupported=refusal)
            return
        for sample in self._samples[str(subject.offer.contribution.of)]:
            n, k = sample.shapes[0]
            tall = (n * -(-_TALL // n), k)
            for (rows, columns), dtype in (*itertools.product(sample.shapes, dtypes), (tall, dtypes[0])):
                stored = StoredProbe(
                    subject, plan, f"{sample.name}/{rows}x{columns}/{dtype}", sample, (rows, columns), dtype
                )
                yield Trial(stored.title, stored.checks())


def _options(subject: Subject) -> list[dict[str, str]]:
    """All sets of options, as far as the class says which it knows (``known``, see OnlineMethod)."""
    known: Mapping[str, Sequence[str]] = getattr(subject.target, "known", {})
    valued = {key: values for key, values in known.items() if values}
    return [dict(zip(valued, chosen, strict=True)) for chosen in itertools.product(*valued.values())]


@dataclass
class HeldTensors:
    """A checkpoint in memory, CheckpointTensors. ``was_read`` are the names that ``read`` was asked for.

    ``metadata``: the texts beside the tensors."""

    tensors: dict[str, torch.Tensor]
    title: str = "the sample"
    was_read: list[str] = field(default_factory=list)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self.tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor."""
        return TensorInfo(tuple(self.tensors[name].shape), dtype_name(self.tensors[name].dtype))

    def read(self, name: str) -> torch.Tensor:
        """A copy of one tensor."""
        self.was_read.append(name)
        return self.tensors[name].clone()


@dataclass(frozen=True)
class Planned:
    """The scheme of a matrix before weights are read, None where it is not quantized."""

    scheme: Scheme | None
    held: HeldTensors

    @classmethod
    def of(cls, subject: Subject, request: MethodRequest, module: Module, held: HeldTensors) -> Planned:
        """Ask a method, and compare names and headers with what it declares, as the engine's loader does.

        Raises CheckpointError for what is missing, left over, or of another shape or dtype.
        """
        method: QuantizationMethod = subject.target(request)
        scheme = method.scheme(module)
        stored = scheme.stored if scheme else (_plain_weight(),)
        expected = {f"{module.name}.{tensor.name}": tensor for tensor in stored}
        if missing := expected.keys() - held.names:
            raise CheckpointError(f"missing tensors: {', '.join(sorted(missing))}")
        if extra := held.names - expected.keys():
            raise CheckpointError(f"tensors that the model has no place for: {', '.join(sorted(extra))}")
        for name, tensor in expected.items():
            info, shape = held.info(name), tensor.shape(module.out_features, module.in_features)
            if info.shape != shape:
                raise CheckpointError(f"tensor {name!r} has shape {list(info.shape)}, expected {list(shape)}")
            if info.dtype not in tensor.dtypes:
                raise CheckpointError(f"tensor {name!r} is {info.dtype}, expected {' or '.join(tensor.dtypes)}")
        return cls(scheme, held)

    def slots(self, module: Module) -> dict[str, torch.Tensor]:
        """Stream the weights: the slots as they are filled. Raises CheckpointError for two that fill one."""
        filled: dict[str, torch.Tensor] = {}
        for tensor in self.scheme.stored if self.scheme else (_plain_weight(),):
            found = tensor.read(self.held.tensors[f"{module.name}.{tensor.name}"])
            if set(found) != set(tensor.fills):
                raise CheckpointError(f"{tensor.name} fills {sorted(found)}, and says {sorted(tensor.fills)}")
            if twice := filled.keys() & found.keys():
                raise CheckpointError(f"{', '.join(sorted(twice))}: filled twice")
            filled |= found
        return filled


def _plain_weight() -> StoredTensor:
    return StoredTensor("weight", (Dim("out"), Dim("in")), _PLAIN, ("weight",), lambda x: {"weight": x})


class _Probe:
    """One matrix. ``title`` is the case."""

    def __init__(self, subject: Subject, plan: Plan, title: str, shape: tuple[int, int], dtype: str) -> None:
        self.subject, self.title, self.dtype = subject, title, dtype
        self.module = Module(_NAME, *shape)
        self._generator_seed = plan.seed_of(f"{subject.offer.contribution}/{title}")

    @property
    def generator(self) -> torch.Generator:
        """A fresh one, in the same state each time."""
        return torch.Generator().manual_seed(self._generator_seed)

    def request(
        self, held: HeldTensors, config: Mapping[str, object] | None, options: Mapping[str, str]
    ) -> MethodRequest:
        """The arguments of the method."""
        info = self.subject.site.platform.info
        return MethodRequest(config, options, held, self.dtype, info, "config.json of the sample")

    def planned(self, held: HeldTensors) -> Planned:
        """The method's scheme for this module in a checkpoint that holds ``held``."""
        raise NotImplementedError

    @cached_property
    def drawn(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The tensors by their names behind the module's, and the numbers that they mean."""
        raise NotImplementedError

    def held(self, **changes: torch.Tensor | None) -> HeldTensors:
        """The checkpoint, with some tensors replaced, or (None) taken away."""
        tensors = {**self.drawn[0], **changes}
        return HeldTensors({f"{self.module.name}.{name}": x.clone() for name, x in tensors.items() if x is not None})

    def scheme(self) -> Finding:
        """``scheme``: there is one; nothing is missing, left over or misdeclared; no weight was read for it."""
        held = self.held()
        try:
            planned = self.planned(held)
        except HardpointError as error:
            return Finding.failed("refused", "scheme", f"a right checkpoint is refused: {error}")
        if not isinstance(planned.scheme, Scheme):
            return Finding.failed(
                "scheme", "scheme", f"must be a Scheme for {self.module.name!r}, got {planned.scheme!r:.80}"
            )
        weights = {f"{self.module.name}.{tensor.name}" for tensor in planned.scheme.stored if "weight" in tensor.fills}
        if bad := sorted(weights.intersection(held.was_read)):
            return Finding.failed("reads-weights", "scheme", f"reads {', '.join(bad)} before weights stream")
        weight, activation = planned.scheme.pair
        if weight.is_plain:
            return Finding.failed("scheme", "scheme", "the spec of the weight has no scales, so it is not quantized")
        wrong = [s.format for spec in (weight, activation) for s in spec.scales if not _is_dtype(s.format)]
        if wrong:
            return Finding.failed("scheme", "scheme", f"scales of unknown formats: {', '.join(wrong)}")
        return Finding()

    @cached_property
    def _loaded(self) -> tuple[Scheme, dict[str, torch.Tensor]]:
        planned = self.planned(self.held())
        assert planned.scheme is not None
        return planned.scheme, planned.slots(self.module)

    def slots(self) -> Finding:
        """``slots``: those that the specs ask for are filled, each with its shape and dtype."""
        scheme, filled = self._loaded
        wanted = weight_slots(scheme, [("", self.module.out_features)], self.module.in_features)
        faults = [Fault("slots", name, "is not filled") for name in wanted.keys() - filled.keys()]
        faults += [Fault("slots", name, "is no slot of these specs") for name in filled.keys() - wanted.keys()]
        for name in wanted.keys() & filled.keys():
            slot, got = wanted[name], filled[name]
            if not _fits(tuple(got.shape), slot.shape) or not _holds(got.dtype, slot.dtype):
                text = (
                    f"is {dtype_name(got.dtype)} {list(got.shape)}, the specs ask for {slot.dtype} {list(slot.shape)}"
                )
                faults.append(Fault("slots", name, text))
        return Finding(tuple(faults))

    def inputs(self) -> Finding:
        """``inputs``: reading changes nothing of what is stored."""
        held = self.held()
        before = {name: x.clone() for name, x in held.tensors.items()}
        self.planned(held).slots(self.module)
        changed = [name for name, x in held.tensors.items() if not equal_bits(x, before[name])]
        return Finding.failed("mutated", ", ".join(changed), "has changed") if changed else Finding()

    def strided(self) -> Finding:
        """``strided``: columns of a wider tensor, as a rank of several is given them, fill the slots with the same."""
        held = self.held()
        held.tensors = {name: _among_others(x) for name, x in held.tensors.items()}
        filled, wanted = self.planned(held).slots(self.module), self._loaded[1]
        wrong = [name for name, x in wanted.items() if not equal_bits(filled[name], x)]
        return (
            Finding.failed("strided", ", ".join(wrong), "differs where the stored tensor is strided")
            if wrong
            else Finding()
        )

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] that was loaded."""
        scheme, filled = self._loaded
        wanted = weight_slots(scheme, [("", self.module.out_features)], self.module.in_features)
        slots = {name: x.to(dtype_of(wanted[name].dtype)).expand(wanted[name].shape) for name, x in filled.items()}
        if "weight_group_index" in slots:  # one for each of the modules that are merged
            slots["weight_group_index"] = slots["weight_group_index"][0]
        return dequantize(slots, scheme.weight, dtype)

    def missing(self) -> Finding:
        """``missing``: without one of its tensors, the checkpoint is refused before weights stream, or reads alike."""
        faults = []
        for name in self.drawn[0]:
            faults += self._refused("missing", name, self.held(**{name: None}), optional=True)
        return Finding(tuple(faults))

    def shape(self) -> Finding:
        """``shape``: a tensor that is longer or shorter along an axis is refused before weights stream."""
        faults = []
        for name, x in self.drawn[0].items():
            wrong = [torch.cat([x, x.narrow(axis, 0, 1)], axis) for axis in range(x.dim())]
            wrong += [x.narrow(axis, 0, n - 1) for axis, n in enumerate(x.shape) if n > 1]
            wrong += [x.expand(2).contiguous()] if not x.dim() else []
            for changed in wrong:
                where = f"{name} {list(changed.shape)}"
                faults += self._refused("shape", where, self.held(**{name: changed.contiguous()}))
        return Finding(tuple(faults))

    def stored_dtype(self) -> Finding:
        """``dtype``: a tensor of a dtype that means something else is refused before weights stream."""
        faults = []
        for name, x in self.drawn[0].items():
            other = torch.int64 if x.dtype.is_floating_point else torch.float64
            changed = torch.zeros(x.shape, dtype=other)
            faults += self._refused("dtype", f"{name} {dtype_name(other)}", self.held(**{name: changed}))
        return Finding(tuple(faults))

    def _refused(self, code: str, where: str, held: HeldTensors, optional: bool = False) -> list[Fault]:
        try:
            planned = self.planned(held)
        except CheckpointError:
            return []
        except Exception as error:  # the plugin's: whatever it raises is to be told
            return [Fault(code, where, f"must raise CheckpointError, raised {type(error).__name__}: {error}")]
        if optional and planned.scheme == self._loaded[0]:
            found = planned.slots(self.module)
            if found.keys() == self._loaded[1].keys() and all(
                equal_bits(x, self._loaded[1][n]) for n, x in found.items()
            ):
                return []
        return [Fault(code, where, "is accepted; it must raise CheckpointError before weights stream")]


class StoredProbe(_Probe):
    """One sample of a format."""

    def __init__(
        self, subject: Subject, plan: Plan, title: str, sample: Sample, shape: tuple[int, int], dtype: str
    ) -> None:
        super().__init__(subject, plan, title, shape, dtype)
        self._sample = sample

    @cached_property
    def drawn(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """See _Probe."""
        return self._sample.write(self.module.out_features, self.module.in_features, self.generator)

    def planned(self, held: HeldTensors) -> Planned:
        """See _Probe."""
        return Planned.of(self.subject, self.request(held, self._sample.config, {}), self.module, held)

    def checks(self) -> list[Check]:
        """Every check of a checkpoint's format."""
        return [
            Check("scheme", self.scheme, decisive=True),
            Check("slots", self.slots, decisive=True),
            Check("values", self.values),
            Check("inputs", self.inputs),
            Check("strided", self.strided),
            Check("missing", self.missing),
            Check("shape", self.shape),
            Check("dtype", self.stored_dtype),
            Check("config", self.config),
        ]

    def values(self) -> Finding:
        """``values``: the numbers that the slots mean are those that were stored, to the bit."""
        got, wanted = self.numbers(torch.float32), self.drawn[1].float()
        if got.shape != wanted.shape:
            return Finding.failed("values", "weight", f"is {list(got.shape)}, expected {list(wanted.shape)}")
        wrong = got != wanted
        if not wrong.any():
            return Finding(compared=wrong.numel())
        row, column = (int(i) for i in wrong.nonzero()[0])
        text = f"at [{row}, {column}] expected {wanted[row, column]:.6g}, got {got[row, column]:.6g}"
        return Finding.failed("values", "weight", f"{text}; {int(wrong.sum())} of {wrong.numel()} differ")

    def config(self) -> Finding:
        """``config``: with a key missing, or of another type, it is read, or refused by an error of Hardpoint's."""
        faults = []
        for key, config in _spoilt(self._sample.config):
            held = self.held()
            try:
                Planned.of(self.subject, self.request(held, config, {}), self.module, held)
            except HardpointError:
                continue
            except Exception as error:  # the plugin's: whatever it raises is to be told
                faults.append(
                    Fault("config", key, f"must raise CheckpointError, raised {type(error).__name__}: {error}")
                )
        return Finding(tuple(faults))


def _spoilt(config: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    for key in config:
        if key != "quant_method":
            yield f"without {key!r}", {k: v for k, v in config.items() if k != key}
            for bad in (None, -7, "?", ["?"], {"?": 0}):
                yield f"{key} = {bad!r}", {**config, key: bad}


class OnlineProbe(_Probe):
    """One plain weight, quantized while it loads: of an output head where the options ask for one."""

    def __init__(
        self,
        subject: Subject,
        plan: Plan,
        title: str,
        options: Mapping[str, str],
        shape: tuple[int, int],
        dtype: str,
    ) -> None:
        super().__init__(subject, plan, title, shape, dtype)
        self._options = options
        if options.get("layers") == "experts":
            self.module = replace(self.module, name=_EXPERT_NAME, expert=0)
        elif options.get("lm_head", "false") != "false":
            self.module = replace(self.module, kind="lm_head")

    @cached_property
    def drawn(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Rows of unlike size, one of zeros, one of positive numbers alone, one far smaller than the others."""
        rows, columns = self.module.out_features, self.module.in_features
        weight = torch.randn(rows, columns, generator=self.generator) * torch.logspace(-2, 1, rows)[:, None]
        weight[0], weight[1], weight[2] = 0, weight[1].abs() + 1, weight[2] * _TINY[0].get(self.dtype, _TINY[1])
        weight = weight.to(dtype_of(self.dtype))
        return {"weight": weight}, weight.double()

    def planned(self, held: HeldTensors) -> Planned:
        """See _Probe."""
        return Planned.of(self.subject, self.request(held, None, self._options), self.module, held)

    def refusal(self) -> Reason | None:
        """Why the method does not quantize a weight of this shape, None where it does."""
        try:
            planned = self.planned(self.held())
        except HardpointError as error:
            return Reason("shape", str(error))
        return Reason("shape", "the method leaves a weight of this shape plain") if planned.scheme is None else None

    def checks(self) -> list[Check]:
        """Every check of an online method."""
        made: list[tuple[str, Callable[[], Finding]]] = [
            ("values", self.values),
            ("inputs", self.inputs),
            ("strided", self.strided),
            ("missing", self.missing),
            ("shape", self.shape),
            ("dtype", self.stored_dtype),
            ("kinds", self.kinds),
            ("options", self.options),
        ]
        decisive = [Check("scheme", self.scheme, decisive=True), Check("slots", self.slots, decisive=True)]
        return decisive + [Check(name, run) for name, run in made]

    def values(self) -> Finding:
        """``values``: no number is further off than rounding by the spec, with scales that just fit, can take it."""
        (scheme, slots), weight = self._loaded, self.drawn[1]
        spec, groups = scheme.weight, slots.get("weight_group_index")
        limit = rounding_bound(weight, spec, None if groups is None else groups.reshape(-1))
        if limit is None:
            return Finding.not_claimed("bound", f"{spec} does not define its elements; see QuantSpec.of")
        error = (self.numbers(torch.float64) - weight).abs()
        ratio = torch.where(error == 0, 0.0, error / limit)
        worst = float(ratio.max())
        if worst <= 1:
            return Finding(measured={"rounding": (worst, 1.0)}, compared=ratio.numel())
        row, column = (int(i) for i in (ratio == ratio.max()).nonzero()[0])
        text = f"at [{row}, {column}] {weight[row, column]:.6g} is {worst:.3g} times as far off as {spec} allows"
        return Finding.failed("rounding", "weight", text)

    def kinds(self) -> Finding:
        """``kinds``: routers and the gates of shared experts are left as they are. So are output heads with
        ``lm_head=false``; any other value quantizes them. Without the option they have more bits than other matrices,
        or are left."""
        experts_alone = self._options.get("layers") == "experts"
        asked = self._options.get("lm_head")
        if self._scheme_of("router", self._options) is not None:
            return Finding.failed("kinds", "router", "must be left as it is")
        head = self._scheme_of("lm_head", self._options)
        if asked is not None and (head is not None) != (asked != "false" and not experts_alone):
            rule = "must be quantized where lm_head asks for it, left with lm_head=false and with layers=experts"
            return Finding.failed("kinds", "lm_head", rule)
        rest = {key: value for key, value in self._options.items() if key != "lm_head"}
        head, other = self._scheme_of("lm_head", rest), self._scheme_of("linear", rest)
        if head is not None and (other is None or _bits(head) <= _bits(other)):
            rule = "must be left as it is without the option lm_head, or have more bits than other matrices"
            return Finding.failed("kinds", "lm_head", rule)
        return Finding()

    def _scheme_of(self, kind: Literal["linear", "lm_head", "router"], options: Mapping[str, str]) -> Scheme | None:
        method: QuantizationMethod = self.subject.target(self.request(self.held(), None, options))
        return method.scheme(Module(_NAME, *_WEIGHTS[0], kind))

    def options(self) -> Finding:
        """``options``: one that there is not is refused by an error of Hardpoint's."""
        try:
            self.subject.target(self.request(self.held(), None, {"no_such_option": "1"}))
        except HardpointError:
            return Finding()
        return Finding.failed("options", "no_such_option", "is accepted; it must raise ConfigError or UnknownNameError")


def _bits(scheme: Scheme) -> int:
    """Of an element of the weight; 0 where the spec does not define it."""
    element = scheme.weight.definition
    return element.bits if element else 0


def _among_others(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the first columns of a tensor of twice as many; one without columns as it is."""
    if x.dim() < 2:
        return x
    raw = x.contiguous().view(torch.uint8)
    return torch.cat([raw, raw.flip(-1)], -1)[..., : raw.shape[-1]].view(x.dtype)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def _fits(got: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether it is of the shape, or broadcasts to it by having one row."""
    return len(got) == len(wanted) and got[1:] == wanted[1:] and got[:1] in (wanted[:1], (1,))


def _holds(got: torch.dtype, wanted: str) -> bool:
    """Whether a copy to the slot keeps the meaning."""
    name = dtype_name(got)
    return name == wanted or (name in _PLAIN and wanted in _PLAIN)
