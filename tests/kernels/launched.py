"""The Triton kernels that a platform's manifest contributes, compiled as they are launched for an absent device.

``python -m tests.kernels.launched DEVICE [--few] [--core-tables] [FAMILY[.OF]=NAME ...]`` calls each contribution of
the device's plugin on tensors of the host: ops on their own cases, products and experts in each claimed format,
attention over batches of several sizes. Launches are left out; each variant is compiled, by the compiler that Triton
brings along, and a line of JSON says what came of it. Without names: all contributions. ``--few``: in bfloat16, few
sizes. ``--core-tables``: in the tiles of core's tuning tables, without those of the device's plugin.

It is a program, because the compiler may abort its process, take minutes, and must not meet the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction, create_function_from_signature

from hardpoint.config import EngineConfig
from hardpoint.conformance.families.latent import SharedLatents, as_causal
from hardpoint.conformance.families.ops import cases
from hardpoint.conformance.site import op_of
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.engine.blueprint import draw
from hardpoint.kernels.launch import overlap_launches
from hardpoint.numerics import calibrate, quantize_weight
from hardpoint.plugin_host import Offer, discover
from hardpoint_plugin_api import (
    AttentionSpec,
    BatchedExpertsCall,
    CheckContext,
    DeviceInfo,
    ExpertsCall,
    ExpertsWorkload,
    LatentSpec,
    LinearCall,
    LinearWorkload,
    OpWorkload,
    QuantSpec,
    Request,
    Scale,
    Workload,
)
from tests.kernels import amdgcn
from tests.kernels.compiling import SHARED_KIB, _of_cubin
from tests.support.attention import Piece, PluginConfigOnly, run_backend
from tests.support.specs import SPECS

_DOT = re.compile(r"tt\.dot\b.*: tensor<([^>]+)> \* tensor<([^>]+)>")
_MATRIX = re.compile(r"^\s+(?:@!?%p\d+\s+)?(?:wmma|mma\.|wgmma\.mma|tcgen05\.mma)", re.MULTILINE)
_BATCHES = (
    [Piece(1, 70)],
    [Piece(1, 300)] * 40 + [Piece(20, 50)],
    [Piece(1, 20)] * 200,
    [Piece(600, 600)],
    [Piece(3000, 3000)],
    [Piece(5000, 5000)],
)
_DTYPES = ("bfloat16", "float32")
_SIZES = ((1024, 2048), (136, 512))
"""Rows and columns of a weight."""


@dataclass(frozen=True)
class Variant:
    """One compiled variant of a kernel: registers, bytes of scratch per thread, bytes of shared memory.

    ``dots`` are rows, columns and element types of its matrix products, ``matrix`` is the number of matrix
    instructions, ``waves`` those that fit a SIMD of an AMD GPU, ``constants`` its constexprs that are numbers. Without
    a backend of the compiler, all but products and constants is None.
    """

    contribution: str
    kernel: str
    num_warps: int
    num_stages: int
    registers: int | None
    spilled: int | None
    shared: int | None
    dots: tuple[str, ...]
    matrix: int | None
    waves: float | None
    constants: dict[str, Any]


def target_of(device: DeviceInfo) -> GPUTarget | None:
    """Triton's name of the device, None where the stock compiler has no backend for it."""
    if not device.arch.startswith(("sm_", "gfx")):
        return None
    if device.arch.startswith("sm_"):
        return GPUTarget("cuda", int(device.arch[3:]), 32)
    return GPUTarget("hip", device.arch, 64 if "wave64" in device.features else 32)


def _dots(ttir: str) -> tuple[str, ...]:
    """Rows, columns and element types of the matrix products in Triton's IR."""
    operands = [(a.split("x"), b.split("x")) for a, b in _DOT.findall(ttir)]
    return tuple(sorted({f"{a[-3]}x{b[-2]} {a[-1]}" for a, b in operands}))


class Recorder:
    """Takes launches of Triton's kernels and compiles each variant once."""

    def __init__(self, device: DeviceInfo) -> None:
        target = target_of(device)
        self.whole, self.target = target is not None, target or GPUTarget("hip", "gfx1201", 32)
        self.most = SHARED_KIB.get(device.arch, 0) << 10
        self.backend = make_backend(self.target)
        self.now = ""
        self._binders: dict[Any, Any] = {}
        self._seen: set[Any] = set()
        self._large: set[Any] = set()

    def install(self) -> None:
        """From now on this process launches nothing."""
        recorder = self

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            recorder.launched(kernel, args, kwargs)

        JITFunction.run = run

    def launched(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile the variant that these arguments want."""
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        kwargs = {**kwargs, "debug": False, "instrumentation_mode": ""}
        bound, specialization, options = self._binders[kernel](*args, **kwargs)
        key = (kernel, str(specialization), str(options), str([v for v in bound.values() if isinstance(v, str)]))
        if key in self._large:
            raise OutOfResources(0, self.most, "shared memory")
        if key in self._seen:
            return
        self._seen.add(key)
        parsed, signature, constexprs, attributes = kernel._pack_args(
            self.backend, kwargs, bound, specialization, options
        )
        print(json.dumps({"began": f"{self.now}: {kernel.__name__} {signature} {constexprs}"}), flush=True)
        source = ASTSource(kernel, signature, constexprs, attributes)
        if not self.whole:
            self._made_first_stage(kernel, source, parsed)
            return
        try:
            with contextlib.redirect_stdout(sys.stderr):
                compiled = triton.compile(source, target=self.target, options=parsed.__dict__)
        except Exception as error:  # whatever the compiler raises is what is to be known
            print(json.dumps({"failed": f"{self.now}: {kernel.__name__}: {error!r}"}), flush=True)
            return
        if compiled.metadata.shared > self.most:  # as Triton does where it loads a kernel
            self._large.add(key)
            raise OutOfResources(compiled.metadata.shared, self.most, "shared memory")
        print(json.dumps(asdict(self._measured(kernel, compiled, parsed, constexprs))), flush=True)

    def _made_first_stage(self, kernel: Any, source: ASTSource, options: Any) -> None:
        """Triton's IR of the kernel, which depends on no device: all that can be made without a backend for it.

        Beside it, what a backend says of the language is that of another.
        """
        context = ir.context()
        ir.load_dialects(context)
        self.backend.load_dialects(context)
        stages = dict[str, Any]()
        self.backend.add_stages(stages, options, source.language)
        try:
            functions, modules = self.backend.get_codegen_implementation(options), self.backend.get_module_map()
            module = stages["ttir"](source.make_ir(self.target, options, functions, modules, context), {})
        except Exception as error:  # whatever the compiler raises is what is to be known
            print(json.dumps({"failed": f"{self.now}: {kernel.__name__}: {error!r}"}), flush=True)
            return
        sizes = options.num_warps, options.num_stages, None, None, None
        found = Variant(self.now, kernel.__name__, *sizes, _dots(str(module)), None, None, {})
        print(json.dumps(asdict(found)), flush=True)

    def _measured(self, kernel: Any, compiled: Any, options: Any, constexprs: Mapping[Any, Any]) -> Variant:
        shared, waves = compiled.metadata.shared, None
        if self.target.backend == "cuda":
            found = _of_cubin(compiled.asm["cubin"])
            number = len(_MATRIX.findall(compiled.asm["ptx"]))
        else:
            read = amdgcn.Assembly.of(compiled.asm["amdgcn"])
            found, number = {"registers": read.registers, "spilled": read.scratch}, sum(read.matrix.values())
            waves = amdgcn.waves(self.target.arch, read.registers, options.num_warps, shared)
        dots = _dots(compiled.asm["ttir"])
        constants = {kernel.params[at[0]].name: value for at, value in constexprs.items() if isinstance(value, int)}
        return Variant(
            self.now,
            kernel.__name__,
            options.num_warps,
            options.num_stages,
            shared=shared,
            dots=dots,
            matrix=number,
            waves=waves,
            constants=constants,
            **found,
        )


def specs_for(device: DeviceInfo) -> Iterator[tuple[QuantSpec, QuantSpec | None]]:
    """Pairs of specs, None for plain activations; 8-bit floats in the device's format."""
    groups = QuantSpec("uint4", scales=(Scale("bfloat16", (1, 128)),), zero_point=True)
    static = QuantSpec("float8_e4m3fn", scales=(Scale("float32", (-1, -1)),))
    for weight, activation in (*SPECS.values(), (groups, None), (static, static)):
        sides = [weight, activation]
        for number, spec in enumerate(sides):
            if spec is not None and spec.element == "float8_e4m3fn" and device.fp8 is not None:
                sides[number] = replace(spec, element=device.fp8.dtype, definition=None)
        yield cast(QuantSpec, sides[0]), sides[1]


class Caller:
    """Calls a device's contributions, each as an engine would, on the host."""

    def __init__(self, preset: str, few: bool, core_tables: bool = False) -> None:
        self.plugins = discover()
        if core_tables:
            for record in self.plugins.records:
                record.folder = None
        self._dtypes = _DTYPES[:1] if few else _DTYPES
        self._sizes = _SIZES[:1] if few else _SIZES
        self._tokens = (1, 16, 512) if few else (1, 2, 3, 8, 9, 16, 17, 32, 64, 128, 512)
        self.expert_tokens: tuple[int, ...] = (1, 16, 64, 512, 4096)
        self.device = self.plugins.devices()[preset]
        self.recorder = Recorder(self.device)
        blueprint = draw(EngineConfig.create(model="demo"), preset)
        self._ctx = replace(blueprint.ctx, torch_device=torch.device("cpu"))
        self.folders = self.plugins.tuning_folders(self.device.platform)

    def context(self, dtype: str) -> Context:
        """A build context of the device, but for its tensors, which are on the host."""
        return replace(self._ctx, dtype=dtype_of(dtype))

    def offers(self) -> Iterator[Offer]:
        """The contributions of the device's plugin that stand in core's kernels."""
        for family in ("op", "linear", "attention", "experts"):
            for offer in self.plugins.offers(family):
                if offer.plugin == self.device.platform and offer.contribution.target.startswith("hardpoint.kernels."):
                    yield offer

    def call(self, offer: Offer) -> None:
        """Call one contribution in all its forms."""
        calls: Mapping[str, Callable[[Offer], None]] = {
            "op": self._op,
            "linear": self._linear,
            "experts": self._experts,
            "attention": self._latent if offer.contribution.of == "latent" else self._attention,
        }
        self.recorder.now = str(offer.contribution)
        calls[offer.contribution.family](offer)

    def _serves(self, offer: Offer, target: Any, workload: Workload) -> bool:
        context = CheckContext(Request(self.device, workload), offer.api)
        packages = ("package-missing", "package-version")
        found = [r for each in offer.contribution.requirements if (r := each.check(context)) and r.code not in packages]
        supports = getattr(target, "supports", None)
        return not found and not (supports and supports(workload, self.device))

    def _op(self, offer: Offer) -> None:
        op = op_of(self.plugins, str(offer.contribution.of))
        target: Any = self.plugins.load(offer)
        for dtype in self._dtypes:
            if offer.contribution.form == "factory":  # the store of a cache with scales, which attention calls, too
                continue
            for case in cases(op, dtype_of(dtype)):
                changes = [case]
                if (spec := case.workload.get("spec")) and self.device.fp8 and spec.element == "float8_e4m3fn":
                    own = replace(spec, element=self.device.fp8.dtype, definition=None)
                    changes = [
                        replace(case, kwargs={**case.kwargs, "spec": own}, workload={**case.workload, "spec": own})
                    ]
                for one in changes:
                    if self._serves(offer, target, OpWorkload(of=op.name, dtype=dtype, **one.workload)):
                        target(*one.args, **one.kwargs)

    def _linear(self, offer: Offer) -> None:
        target: Any = self.plugins.load(offer)
        for dtype in self._dtypes:
            for weight_spec, activation in (*specs_for(self.device), (QuantSpec(dtype), None)):
                pair = weight_spec, activation or QuantSpec(dtype)
                for n, k in self._sizes:
                    workload = LinearWorkload(dtype=dtype, in_features=k, out_features=n, spec=pair)
                    if not self._serves(offer, target, workload):
                        continue
                    kernel, ctx = target(self.context(dtype), workload), self.context(dtype)
                    plain = torch.randn(n, k)
                    slots = {"weight": plain.to(ctx.dtype)} if pair[0].is_plain else quantize_weight(plain, pair[0])
                    x = torch.randn(512, k).to(ctx.dtype)
                    slots |= calibrate(x, pair[1])
                    packed = kernel.prepack(slots)
                    for tokens in self._tokens:
                        kernel.apply(LinearCall(x[:tokens], packed))

    def _experts(self, offer: Offer) -> None:
        target: Any = self.plugins.load(offer)
        count, top_k, hidden, width = 8, 2, 512, 256
        for weight_spec, activation in (*specs_for(self.device), (QuantSpec("bfloat16"), None)):
            pair = weight_spec, activation or QuantSpec("bfloat16")
            workload = ExpertsWorkload(
                dtype="bfloat16",
                spec=pair,
                activation="silu_and_mul",
                format=target.format,
                num_experts=count,
                top_k=top_k,
                hidden_size=hidden,
                intermediate_size=width,
            )
            if not self._serves(offer, target, workload):
                continue
            kernel, slots = target(self.context("bfloat16"), workload), dict[str, torch.Tensor]()
            for name, shape in (("w13", (2 * width, hidden)), ("w2", (hidden, width))):
                plain = torch.randn(shape)
                one = {"weight": plain.bfloat16()} if pair[0].is_plain else quantize_weight(plain, pair[0])
                slots |= {f"{name}.{slot}": torch.stack([x] * count) for slot, x in one.items()}
            packed = kernel.prepack(slots)
            for tokens in self.expert_tokens:
                x, ids = torch.randn(tokens, hidden).bfloat16(), torch.randint(0, count, (tokens, top_k)).int()
                space = torch.zeros(kernel.workspace_bytes(count * tokens), dtype=torch.uint8)
                if target.format == "batched":
                    x, counts = x.expand(count, -1, -1).contiguous(), torch.full((count,), tokens, dtype=torch.int32)
                    kernel.apply(BatchedExpertsCall(x, counts, packed, torch.empty_like(x), space))
                else:
                    kernel.apply(ExpertsCall(x, ids, torch.rand(tokens, top_k), packed, torch.empty_like(x), space))

    def _build(self) -> PluginConfigOnly:
        return PluginConfigOnly({}, device=self.device, tuning_folders=self.folders)

    def _attention(self, offer: Offer) -> None:
        target: Any = self.plugins.load(offer)
        plain = AttentionSpec(8, 2, 128, 0.1, "bfloat16", "bfloat16", 16)
        fp8 = self.device.fp8.dtype if self.device.fp8 else "float8_e4m3fn"
        for spec in (
            plain,
            replace(plain, head_size=64, window=1024),
            replace(plain, head_size=256),
            replace(plain, chunk=8192, soft_cap=30.0, sinks=True, alibi=True),
            replace(plain, dtype="float32", kv_dtype="float32"),
            *(replace(plain, kv_dtype=dtype) for dtype in (fp8, "int8")),
        ):
            if self._serves(offer, target, spec.workload()):
                given = torch.ones(8) if spec.sinks else None
                for batch in _BATCHES:
                    run_backend(target, spec, batch, sinks=given, alibi_slopes=given, ctx=self._build())

    def _latent(self, offer: Offer) -> None:
        target: Any = self.plugins.load(offer)
        for heads, dtype in ((16, "bfloat16"), (128, "bfloat16"), (16, "float32")):
            spec = LatentSpec(heads, 512, 64, 0.1, dtype, dtype, 16)
            if self._serves(offer, target, spec.workload()):
                for batch in _BATCHES:
                    shared = SharedLatents.of(spec)
                    run_backend(as_causal(target), shared, batch, value_size=512, ctx=self._build())


def main(preset: str, names: list[str]) -> None:
    """Compile what the device's plugin contributes, or what is named, and print a line for each variant."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    caller = Caller(preset, "--few" in names, "--core-tables" in names)
    names = [name for name in names if not name.startswith("--")]
    if caller.device.arch.startswith("sm_") and int(caller.device.arch[3:]) >= 90:
        from hardpoint_cuda.overlapped import OVERLAP

        overlap_launches("cpu", OVERLAP)
    caller.recorder.install()
    for offer in caller.offers():
        contribution = offer.contribution
        place = f"{contribution.family}.{contribution.of}" if contribution.of else contribution.family
        if not names or f"{place}={contribution.name}" in names:
            caller.call(offer)
    print(json.dumps({"ended": True}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
