"""Which scheme each matrix of a model has: what the build context carries as ``ctx.quantization``.

Layers ask it while they are constructed. Once all have, it knows which of the checkpoint's tensors go where.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hardpoint.checkpoint.reading import Address, Grouped, Reading, Turn, WeightNames
from hardpoint.plugin_host import Offer
from hardpoint.plugin_host.blame import blame, misbehaved
from hardpoint.quantization.device_formats import cache_scale_factor, on_device
from hardpoint.quantization.merging import by_row, merge_schemes
from hardpoint.quantization.shard_checks import (
    FEWER,
    WHOLE_EXPERTS,
    check_shards,
    check_turned_shards,
    cut_error,
)
from hardpoint_plugin_api import (
    NVFP4,
    CacheScales,
    CheckpointError,
    CheckpointTensors,
    Dim,
    ExpertStack,
    Fp8Format,
    LinearArgs,
    Module,
    QuantizationMethod,
    Scheme,
    ShardPlan,
    StoredTensor,
)
from hardpoint_plugin_api.elements import BUILT_IN

logger = logging.getLogger(__name__)

_CACHE_SCALES = re.compile(r".*\.(([kvq]|kv|prob)_scale|[kv]_proj\.output_scale)$")
"""Scales for attention, which nobody needs whose cache is not quantized by them; the second form is of early 2024."""

_INTERLEAVED = "interleaved"
"""The order of a stack's rows in place of a part; see WeightNames."""

_Ask = Callable[[QuantizationMethod, Module], Scheme | None]
"""How a method is asked for the scheme of a module."""


class _UnlikeError(CheckpointError):
    """Experts are quantized unlike each other."""


@dataclass(frozen=True)
class Method:
    """A method in use: the object, whose it is, and the checkpoint that it reads."""

    reader: QuantizationMethod
    offer: Offer
    tensors: CheckpointTensors


@dataclass(frozen=True)
class Quantization:
    """The method in use, if any, and what it said of the layers constructed so far.

    ``fp8`` is the device's 8-bit float, to which schemes are converted.
    ``_modules`` are the checkpoint's modules by layer path and part; ``_schemes`` what was answered, ``_apart`` the
    paths of layers whose parts have a matrix each; ``_shards`` how ranks divide rows and columns, and ``_stacks`` how
    they divide the experts of a stack that one tensor holds; ``_unlike`` the layers whose experts become numbers.
    ``_turns`` are those of parts that take turns in a module's matrix; ``_divided`` the layers of which ranks have a
    piece of each part, where one module has all parts. ``_columns``: what divides the columns that ranks have of all
    matrices of a layer's experts.
    """

    method: Method | None = None
    fp8: Fp8Format | None = None
    _modules: Mapping[tuple[str, str | None], str] = field(default_factory=dict)
    _schemes: dict[tuple[str, str | None], tuple[Module, Scheme]] = field(default_factory=dict)
    _apart: set[str] = field(default_factory=set)
    _shards: dict[tuple[str, str | None], tuple[ShardPlan | None, ShardPlan | None]] = field(default_factory=dict)
    _cache_scales: dict[str, tuple[CacheScales, float]] = field(default_factory=dict)
    _stacks: dict[str, ShardPlan | None] = field(default_factory=dict)
    _unlike: set[str] = field(default_factory=set)
    _turns: Mapping[tuple[str, str | None], Turn] = field(default_factory=dict)
    _divided: dict[str, LinearArgs] = field(default_factory=dict)
    _columns: dict[str, int] = field(default_factory=dict)

    def for_model(self, names: Mapping[str, Address | None]) -> Quantization:
        """The same method for a model whose tensors have these ``names``, plain weights assumed (see load_weights)."""
        modules, turns = dict[tuple[str, str | None], str](), dict[tuple[str, str | None], Turn]()
        for name, address in names.items():
            parts = address.turns if isinstance(address, Grouped) else {address: None} if address else {}
            for one, turn in parts.items():
                path, slot, part = split_address(one)
                if slot == "weight":
                    modules[path, part] = name.removesuffix(".weight")
                    if turn is not None:
                        turns[path, part] = turn
        return replace(
            self,
            _modules=modules,
            _schemes={},
            _apart=set(),
            _shards={},
            _cache_scales={},
            _stacks={},
            _unlike=set(),
            _columns={},
            _turns=turns,
            _divided={},
        )

    def linear(self, path: str, args: LinearArgs, dtype: str) -> Scheme | None:
        """The scheme of the layer at ``path``; None where its parts must have a matrix each, at ``path.PART``."""
        named = len(args.parts) > 1
        if named and self.method is not None and (path, None) in self._modules:
            return self._of_one_tensor(path, args, dtype)
        keys = [(path, part if named else None) for part, _ in args.parts]
        schemes = [self._scheme(key, rows, args, dtype) for key, (_, rows) in zip(keys, args.parts, strict=True)]
        whole = merge_schemes(schemes, [rows for _, rows in args.own_parts])
        if whole is None:
            self._apart.add(path)
        else:
            shards = args.row_shards or (None,) * len(keys)
            self._shards.update({key: (rows, args.column_shard) for key, rows in zip(keys, shards, strict=True)})
            if all(key in self._turns for key in keys):
                check_turned_shards(path, whole, args)
            else:
                check_shards(path, whole, args)
        return whole

    def _of_one_tensor(self, path: str, args: LinearArgs, dtype: str) -> Scheme:
        """The scheme of a layer whose parts are one module of the checkpoint.

        Raises CheckpointError where a block of rows reaches from one part into the next, and ConfigError where ranks
        would cut one.
        """
        scheme = self._scheme((path, None), args.out_features, args, dtype)
        if scheme.weight.is_plain:
            return scheme
        whole = merge_schemes([scheme] * len(args.parts), [rows for _, rows in args.parts])
        if whole is None:
            raise CheckpointError(
                f"layer {path!r}: the scales of its tensor have blocks of rows that reach from one of its parts "
                f"({', '.join(f'{name} {rows}' for name, rows in args.parts)} rows) into the next"
            )
        if args.row_shards:
            check_turned_shards(path, whole, args)
            self._divided[path] = args
        self._shards[path, None] = None, args.column_shard
        return whole

    def experts(
        self, path: str, matrices: Mapping[str, LinearArgs], experts: ShardPlan, dtype: str
    ) -> dict[str, Scheme]:
        """The schemes of stacks of matrices at ``path.NAME``, one for each of the ``experts``, as ranks have them.

        Their parts are ``N.PART``, or ``N`` where a matrix has one. A stack has one pair of specs: where its experts or
        parts are quantized unlike each other, and where one stack is quantized and another is not, all become plain
        numbers while they load, if the method can make them. Raises CheckpointError where it cannot, and where one
        tensor holds all experts and the method does not read such.
        """
        stacks = [(name, f"{path}.{name}", args) for name, args in matrices.items()]
        shared = math.gcd(*(args.own_in_features for args in matrices.values()))
        self._columns.update({own: shared for _, own, _ in stacks})
        try:
            schemes = {name: self._experts(own, args, experts, dtype, self._kept) for name, own, args in stacks}
            if len({scheme.weight.is_plain for scheme in schemes.values()}) > 1:
                specs = ", ".join(f"{name} {scheme.weight}" for name, scheme in schemes.items())
                raise _UnlikeError(
                    f"layer {path!r}: some matrices of its experts are quantized and some are not ({specs}), and no "
                    "kernel runs such experts"
                )
        except _UnlikeError as unlike:
            if self.method is None or type(self.method.reader).numbers is QuantizationMethod.numbers:
                raise
            if not self._unlike:
                logger.info("%s; they become numbers of %s while they load, as in further such layers", unlike, dtype)
            self._unlike.add(path)
            return {name: self._experts(own, args, experts, dtype, self._numbers) for name, own, args in stacks}
        return schemes

    def _kept(self, reader: QuantizationMethod, module: Module) -> Scheme | None:
        return reader.scheme(module)

    def _numbers(self, reader: QuantizationMethod, module: Module) -> Scheme | None:
        scheme = reader.numbers(module)
        if isinstance(scheme, Scheme) and not scheme.weight.is_plain:
            assert self.method is not None
            raise misbehaved(self.method.offer, f"must make plain numbers of {module.name!r}, got {scheme.weight}")
        return scheme

    def _experts(self, path: str, args: LinearArgs, experts: ShardPlan, dtype: str, ask: _Ask) -> Scheme:
        """The scheme of one stack, as ``ask`` has the method answer. Raises _UnlikeError for experts unlike each
        other."""
        numbers = range(experts.full)  # a checkpoint's tensors of other ranks' experts must be known to be skipped
        stack = self._stack_key(path, args) if self.method is not None else None
        if stack is not None:
            return self._stack(stack, args, experts, dtype)
        shards = args.row_shards or (None,) * len(args.parts)
        first: Scheme | None = None
        for number in numbers:
            names = [f"{number}.{part}" if len(args.parts) > 1 else str(number) for part, _ in args.parts]
            keys = [(path, name) for name in names]
            parts = zip(keys, args.parts, strict=True)
            schemes = [self._scheme(key, rows, args, dtype, number, ask) for key, (_, rows) in parts]
            whole = merge_schemes(schemes, [rows for _, rows in args.own_parts])
            first = first or whole
            if whole is None and all(scheme == schemes[0] for scheme in schemes):
                block = max(s.block[0] for s in schemes[0].weight.scales)
                if args.row_shards and merge_schemes(schemes, [rows for _, rows in args.parts]) is not None:
                    raise cut_error(path, block, args.row_shards[0], "rows", WHOLE_EXPERTS + FEWER)
                raise CheckpointError(
                    f"layer {path!r}: an expert's {' and '.join(part for part, _ in args.parts)} share one matrix, and "
                    f"the scales' blocks of {block} rows do not divide the {args.own_parts[0][1]} rows that each has "
                    "here; quantize these experts with other scales"
                )
            if whole is None or first is None or whole.pair != first.pair:
                raise _UnlikeError(
                    f"layer {path!r}: the matrices of expert {number} are quantized unlike each other, or unlike those "
                    "of the experts before it, and experts run all at once; quantize all experts of a layer alike"
                )
            self._shards.update({key: (rows, args.column_shard) for key, rows in zip(keys, shards, strict=True)})
        assert first is not None
        check_shards(path, first, args, WHOLE_EXPERTS)
        return by_row(first)

    def _stack_key(self, path: str, args: LinearArgs) -> tuple[str, str | None] | None:
        """The key of the tensor that holds all experts at ``path``; None where each has tensors of its own.

        Of a model that names both, the checkpoint tells which it has; where it has neither, the first that is named.
        """
        first = (path, f"0.{args.parts[0][0]}" if len(args.parts) > 1 else "0")
        named = [key for key in self._modules if key[0] == path and (key == first or not (key[1] or "")[:1].isdigit())]
        stored = [key for key in named if self._is_stored(self._modules[key])]
        key = next(iter(stored or named), None)
        return None if key == first else key

    def _is_stored(self, module: str) -> bool:
        """Whether the checkpoint has a tensor of ``module``: under its name, or one that begins with it."""
        assert self.method is not None
        return any(name.startswith(module) for name in self.method.tensors.names)

    def _stack(self, key: tuple[str, str | None], args: LinearArgs, experts: ShardPlan, dtype: str) -> Scheme:
        """The scheme of experts whose matrices one tensor holds."""
        assert self.method is not None
        if not self.method.reader.reads_stacks:
            raise CheckpointError(
                f"layer {key[0]!r}: this model's checkpoints hold all experts in one tensor, and quantization method "
                f"{self.method.offer.contribution.name!r} reads one matrix at a time; run it without quantization"
            )
        orders, (name, _, tensor) = frozenset((key[1] or "").split(",")), self._modules[key].rpartition(".")
        rows = {n for _, n in args.parts}
        assert len(rows) == 1, "gate and up are of one size"
        stack = ExpertStack(
            tensor,
            experts.full,
            len(args.parts),
            interleaved="interleaved" in orders,
            transposed="transposed" in orders,
        )
        rows_of_all, own = len(args.parts) * rows.pop(), self._columns[key[0]]
        module = Module(name, rows_of_all, args.in_features, stack=stack, own_in_features=own)
        scheme = self._asked(key, module, dtype)
        self._shards[key] = (args.row_shards or (None,))[0], args.column_shard
        self._stacks[key[0]] = experts
        check_shards(key[0], scheme, args, WHOLE_EXPERTS)
        return by_row(scheme)

    def _scheme(
        self,
        key: tuple[str, str | None],
        rows: int,
        args: LinearArgs,
        dtype: str,
        expert: int | None = None,
        ask: _Ask | None = None,
    ) -> Scheme:
        known = self._known(key)
        if self.method is None or known is None:
            return Scheme.plain(dtype)
        name, turn = self._modules[known], self._turns.get(known)
        if turn is not None:
            module = Module(name, turn.total, args.in_features, own_in_features=args.own_in_features)
            return self._of_turn(key, module, turn, dtype)
        if args.kind == "embedding":
            with blame(self.method.offer):
                self.method.reader.leave_tied_head()
            module = Module(name, rows, args.in_features)
            return self._asked(key, module, dtype, lambda reader: reader.embedding(module, tied=True))
        own = args.own_in_features if expert is None else self._columns[key[0]]
        module = Module(name, rows, args.in_features, args.kind, expert, own_in_features=own)
        return self._asked(key, module, dtype, None if ask is None else lambda reader: ask(reader, module))

    def _known(self, key: tuple[str, str | None]) -> tuple[str, str | None] | None:
        """The key of the module that ``key`` is of; None where the checkpoint has none."""
        if key in self._modules:
            return key
        path, _, part = key[0].rpartition(".")  # a part on its own asks again, under its own path
        return (path, part) if key[1] is None and path in self._apart and (path, part) in self._modules else None

    def _of_turn(self, key: tuple[str, str | None], module: Module, turn: Turn, dtype: str) -> Scheme:
        """The scheme of a part that takes turns with others in ``module``.

        Where a block of rows reaches from one part into another, nothing is quantized by a method that quantizes while
        loading; raises CheckpointError for a stored one.
        """
        scheme = self._asked(key, module, dtype)
        blocks = [scale.block[0] for scale in scheme.weight.scales if scale.block[0] > 1]
        if not any(map(turn.cuts, blocks)):
            return scheme
        assert self.method is not None
        if not self.method.reader.online:
            raise CheckpointError(
                f"{self.method.tensors.title}: {module.name!r} holds the rows of several matrices in {turn.groups} "
                f"groups of {' + '.join(map(str, turn.sizes))}, and its scales are for blocks of {max(blocks)} rows, "
                "which reach from one matrix into the next; leave this module out of quantization, or quantize it with "
                "other scales"
            )
        del self._schemes[key]
        return Scheme.plain(dtype)

    def embedding(self, path: str, rows: int, columns: int, dtype: str, shard: ShardPlan | None) -> None:
        """Note how the checkpoint stores the embedding at ``path``, whose weight becomes numbers of ``dtype``.

        Raises ConfigError where ``shard``, the plan of its rows, cuts what is stored as one.
        """
        name = self._modules.get((path, None))
        if self.method is None or name is None:
            return
        module = Module(name, rows, columns)
        scheme = self._asked((path, None), module, dtype, lambda reader: reader.embedding(module, tied=False))
        if not scheme.weight.is_plain:
            raise misbehaved(self.method.offer, f"must make plain numbers of {name!r}, got {scheme.weight}")
        self._shards[path, None] = shard, None

    def _asked(
        self,
        key: tuple[str, str | None],
        module: Module,
        dtype: str,
        ask: Callable[[QuantizationMethod], Scheme | None] | None = None,
    ) -> Scheme:
        """The method's answer for ``module``, kept under ``key``; plain numbers of ``dtype`` where it has none."""
        assert self.method is not None
        with blame(self.method.offer):
            scheme: object = ask(self.method.reader) if ask else self.method.reader.scheme(module)
        if scheme is None:
            return Scheme.plain(dtype)
        if not isinstance(scheme, Scheme):
            raise misbehaved(self.method.offer, f"must return a Scheme or None, got {scheme!r:.80}")
        self._schemes[key] = module, scheme = module, on_device(scheme, self.fp8)
        return scheme

    def cache_scales(self, path: str, kv_dtype: str) -> bool:
        """Whether the checkpoint has scales for a cache of ``kv_dtype`` of the attention layer at ``path``, which asks
        for them."""
        module = self._modules.get((f"{path}.qkv", "q"))
        if self.method is None or module is None or kv_dtype not in (*BUILT_IN, NVFP4):
            return False
        attention = module.rpartition(".")[0]
        with blame(self.method.offer):
            scales = self.method.reader.cache_scales(attention)
        factor = None if scales is None else cache_scale_factor(scales.element, kv_dtype)
        if scales is None or factor is None:
            return False
        self._cache_scales[path] = scales, factor
        return True

    def weight_names(self, names: Mapping[str, Address | None]) -> WeightNames:
        """``names`` with quantized weights' own tensors in place of plain ones."""
        if self.method is None:
            return dict(names)
        found: dict[str, Address | tuple[Reading, ...] | None] = {}
        for name, address in names.items():
            if address is None:
                found[name] = None
                continue
            turns = address.turns if isinstance(address, Grouped) else {address: None}
            parts = [self._readings(one, turn) for one, turn in turns.items()]
            if any(part is None for part in parts):
                found[name] = self._own(address) if isinstance(address, str) else address
                continue
            tensors: dict[str, tuple[Reading, ...]] = {}
            for reading in (reading for part in parts for reading in part or ()):
                tensor = f"{reading.module.name}.{reading.stored.name}"
                tensors[tensor] = (*tensors.get(tensor, ()), reading)
            for tensor, taken in tensors.items():
                found.setdefault(tensor, taken)
        for path, (scales, factor) in self._cache_scales.items():
            for name, slot in ((scales.k, "k_scale"), (scales.v, "v_scale")):
                found[name] = _cache_scale(name, len(self.method.tensors.info(name).shape), path, slot, factor)
        unneeded = (name for name in self.method.tensors.names - found.keys() if _CACHE_SCALES.match(name))
        return found | dict.fromkeys(unneeded)

    def _own(self, address: str) -> str:
        """``address``, or that of a part on its own, where parts have a matrix each."""
        path, slot, part = split_address(address)
        return address if part is None or path not in self._apart else join_address(f"{path}.{part}", slot, None)

    def _readings(self, address: str, turn: Turn | None) -> list[Reading] | None:
        """How the tensors of a quantized weight at ``address`` are read; None for a plain one, and for other slots."""
        path, slot, part = split_address(self._own(address))
        known, shards = self._schemes.get((path, part)), self._shards.get((path, part), (None, None))
        if known is None or slot != "weight":
            return None
        module, scheme = known
        if module.stack is not None:
            part = _INTERLEAVED if module.stack.interleaved else None
        pieces: list[tuple[str | None, tuple[ShardPlan | None, ShardPlan | None], Turn | None]]
        pieces = [(part, shards, turn)]
        if path in self._divided:
            args = self._divided[path]
            sizes = tuple(rows for _, rows in args.parts)
            divided = enumerate(zip(args.parts, args.row_shards, strict=True))
            pieces = [(own, (rows, None), Turn(1, sizes, place)) for place, ((own, _), rows) in divided]
        experts = self._stacks.get(path)
        return [
            Reading(stored, module, {fill: join_address(path, fill, own) for fill in stored.fills}, *plans, experts, by)
            for own, plans, by in pieces
            for stored in scheme.stored
        ]


def _cache_scale(name: str, rank: int, path: str, slot: str, factor: float) -> tuple[Reading, ...]:
    """One number, stored with any rank; ``factor`` times it fills a slot of the attention layer at ``path``."""
    attention, _, last = name.rpartition(".")
    dtypes = ("float32", "bfloat16", "float16")
    stored = StoredTensor(last, (Dim(None),) * rank, dtypes, (slot,), lambda x: {slot: x.reshape(1).float() * factor})
    return (Reading(stored, Module(attention, 1, 1), {slot: f"{path}.{slot}"}),)


def split_address(address: str) -> tuple[str, str, str | None]:
    """``"blocks.0.qkv.weight[q]"`` -> path, slot, part (None where there is none)."""
    plain, _, part = address.removesuffix("]").partition("[")
    path, _, slot = plain.rpartition(".")
    return path, slot, part or None


def join_address(path: str, slot: str, part: str | None) -> str:
    """The inverse of ``split_address``."""
    return f"{path}.{slot}" + (f"[{part}]" if part else "")
