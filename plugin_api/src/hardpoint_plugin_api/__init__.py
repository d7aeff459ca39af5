"""The contract between Hardpoint and its plugins. Importing it imports no torch.

A public name is imported from its module when it is first used: a command that lists plugins needs a third of them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardpoint_plugin_api.all2all import All2All, Dispatched, DispatchHandle
    from hardpoint_plugin_api.attention import (
        AttentionBackend,
        AttentionBatch,
        AttentionCall,
        AttentionMetadata,
        AttentionSpec,
        CaptureGrade,
        StepPlanner,
        StoreCall,
    )
    from hardpoint_plugin_api.builds import KernelBuild
    from hardpoint_plugin_api.cache import (
        GROUP_SIZE,
        NULL_PAGE,
        NVFP4,
        CacheLayout,
        CacheSpec,
        Latest,
        Plane,
        Region,
        Retention,
        Scaling,
        Span,
    )
    from hardpoint_plugin_api.cache_layouts import (
        GroupScaledLayout,
        PlainLayout,
        ScaledLayout,
        write_group_rounded,
        write_rounded,
    )
    from hardpoint_plugin_api.cache_users import CacheUser, CacheUsers
    from hardpoint_plugin_api.communicator import Collectives, Communicator, GroupMember, Parallel, RankGroup
    from hardpoint_plugin_api.context import (
        BuildContext,
        Counter,
        EngineLimits,
        Gauge,
        Histogram,
        Metrics,
        Resources,
        Scope,
    )
    from hardpoint_plugin_api.contributions import Contribution, Form, Preference
    from hardpoint_plugin_api.dequantization import decode_elements, dequantize, minimum_slot, scale_slot
    from hardpoint_plugin_api.device import DeviceInfo, Fp8Format, MemorySnapshot, NumaNode
    from hardpoint_plugin_api.drafter import NO_DRAFT, DraftCall, Drafter, DrafterArgs
    from hardpoint_plugin_api.elements import Element, TableElement
    from hardpoint_plugin_api.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineDeadError,
        EngineError,
        HardpointError,
        ManifestError,
        PlatformError,
        PluginConflictError,
        PluginError,
        PluginLoadError,
        RequestError,
        SelectionError,
        UnknownNameError,
        nearest,
    )
    from hardpoint_plugin_api.experts import (
        ActivationFormat,
        BatchedExpertsCall,
        BatchedExpertsKernel,
        ExpertsCall,
        ExpertsKernel,
        expert_matrix,
    )
    from hardpoint_plugin_api.families import FAMILIES, Family, Stability
    from hardpoint_plugin_api.hooks import Choice, ConfigChange, EngineInfo, HookSpecs, hookimpl
    from hardpoint_plugin_api.latent import LatentBackend, LatentCall, LatentSpec, LatentStoreCall
    from hardpoint_plugin_api.layers import (
        AdjustedArgs,
        AttentionArgs,
        BlockArgs,
        EmbeddingArgs,
        GatedDeltaNetArgs,
        KimiDeltaAttentionArgs,
        LayerArgs,
        LinearArgs,
        LinearAttentionArgs,
        Mamba2Args,
        MLAArgs,
        MLPArgs,
        MoEArgs,
        NormArgs,
        QueryScalingArgs,
        RopeArgs,
        RouterArgs,
        SparseIndexerArgs,
        StackArgs,
        WeightSlot,
    )
    from hardpoint_plugin_api.linear import LinearCall, LinearKernel, Quantized
    from hardpoint_plugin_api.manifest import (
        ENTRY_POINT_GROUP,
        MANIFEST_NAME,
        ConfigKey,
        ConfigValue,
        Manifest,
        Namesake,
        parse_manifest,
        read_manifest,
    )
    from hardpoint_plugin_api.parsers import (
        ContentDelta,
        ParserArgs,
        ParserEvent,
        ReasoningDelta,
        ReasoningParser,
        ToolCallDelta,
        ToolCallEnd,
        ToolCallStart,
        ToolParser,
    )
    from hardpoint_plugin_api.platform import (
        NO_DEVICE,
        CapturedGraph,
        EagerGraphEngine,
        GraphEngine,
        Memory,
        MemoryTag,
        Platform,
        StepLimits,
    )
    from hardpoint_plugin_api.quant import QuantSpec, Scale, SpecPattern
    from hardpoint_plugin_api.quantization import (
        CacheScales,
        CheckpointTensors,
        Dim,
        ExpertStack,
        MethodRequest,
        Module,
        QuantizationMethod,
        Scheme,
        StoredTensor,
        TensorInfo,
        weight_slots,
    )
    from hardpoint_plugin_api.reasons import Reason
    from hardpoint_plugin_api.requests import (
        All2AllWorkload,
        AttentionWorkload,
        CommunicatorWorkload,
        DrafterWorkload,
        ElementWorkload,
        ExpertsWorkload,
        Feature,
        LatentWorkload,
        LayerWorkload,
        LinearWorkload,
        ModelWorkload,
        OpWorkload,
        Phase,
        PlatformWorkload,
        QuantizationWorkload,
        ReasoningParserWorkload,
        Request,
        ScalarValue,
        ToolParserWorkload,
        Workload,
    )
    from hardpoint_plugin_api.requirements import CheckContext, Requirement, TokensRequirement, parse_requirement
    from hardpoint_plugin_api.sharding import ShardPlan, ShardSlice
    from hardpoint_plugin_api.step import ForwardStep
    from hardpoint_plugin_api.structured import StructuredOutput, StructureKind
    from hardpoint_plugin_api.versions import API_VERSION, MANIFEST_SCHEMA, ApiVersion, check_api

__all__ = [
    "API_VERSION",
    "ActivationFormat",
    "All2All",
    "All2AllWorkload",
    "ApiVersion",
    "AttentionArgs",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionCall",
    "AttentionMetadata",
    "AttentionSpec",
    "AttentionWorkload",
    "BatchedExpertsCall",
    "BatchedExpertsKernel",
    "AdjustedArgs",
    "BlockArgs",
    "BuildContext",
    "CacheLayout",
    "CacheScales",
    "CacheSpec",
    "CacheUser",
    "CacheUsers",
    "CapacityError",
    "CaptureGrade",
    "CheckContext",
    "CheckpointError",
    "CheckpointTensors",
    "Choice",
    "Collectives",
    "Communicator",
    "CommunicatorWorkload",
    "ConfigChange",
    "ConfigError",
    "ConfigKey",
    "ConfigValue",
    "ContentDelta",
    "Contribution",
    "Counter",
    "DeviceInfo",
    "Dim",
    "DispatchHandle",
    "Dispatched",
    "DraftCall",
    "Drafter",
    "DrafterArgs",
    "DrafterWorkload",
    "ENTRY_POINT_GROUP",
    "EagerGraphEngine",
    "Element",
    "ElementWorkload",
    "EmbeddingArgs",
    "EngineDeadError",
    "EngineError",
    "EngineInfo",
    "EngineLimits",
    "CapturedGraph",
    "ExpertStack",
    "ExpertsCall",
    "ExpertsKernel",
    "ExpertsWorkload",
    "FAMILIES",
    "Family",
    "Feature",
    "Form",
    "ForwardStep",
    "Fp8Format",
    "GatedDeltaNetArgs",
    "Gauge",
    "GROUP_SIZE",
    "GraphEngine",
    "GroupMember",
    "GroupScaledLayout",
    "HardpointError",
    "Histogram",
    "HookSpecs",
    "Latest",
    "KimiDeltaAttentionArgs",
    "LatentBackend",
    "LatentCall",
    "KernelBuild",
    "LatentSpec",
    "LatentStoreCall",
    "LatentWorkload",
    "LayerArgs",
    "LayerWorkload",
    "LinearArgs",
    "LinearAttentionArgs",
    "LinearCall",
    "LinearKernel",
    "LinearWorkload",
    "MANIFEST_NAME",
    "MANIFEST_SCHEMA",
    "MLAArgs",
    "MLPArgs",
    "Mamba2Args",
    "Manifest",
    "ManifestError",
    "Memory",
    "MemorySnapshot",
    "MemoryTag",
    "MethodRequest",
    "Metrics",
    "MoEArgs",
    "ModelWorkload",
    "Module",
    "NO_DEVICE",
    "NO_DRAFT",
    "NULL_PAGE",
    "NVFP4",
    "Namesake",
    "NormArgs",
    "NumaNode",
    "OpWorkload",
    "Parallel",
    "ParserArgs",
    "ParserEvent",
    "Phase",
    "PlainLayout",
    "Plane",
    "Platform",
    "PlatformError",
    "PlatformWorkload",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "Preference",
    "QuantSpec",
    "QuantizationMethod",
    "QuantizationWorkload",
    "Quantized",
    "QueryScalingArgs",
    "RankGroup",
    "Reason",
    "ReasoningDelta",
    "ReasoningParser",
    "ReasoningParserWorkload",
    "Region",
    "Request",
    "RequestError",
    "Requirement",
    "Resources",
    "Retention",
    "RopeArgs",
    "RouterArgs",
    "SparseIndexerArgs",
    "ScalarValue",
    "Scale",
    "ScaledLayout",
    "Scaling",
    "Scheme",
    "Scope",
    "SelectionError",
    "ShardPlan",
    "ShardSlice",
    "Span",
    "SpecPattern",
    "Stability",
    "StackArgs",
    "StepLimits",
    "StepPlanner",
    "StoreCall",
    "StoredTensor",
    "StructureKind",
    "StructuredOutput",
    "TableElement",
    "TensorInfo",
    "TokensRequirement",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolParser",
    "ToolParserWorkload",
    "UnknownNameError",
    "WeightSlot",
    "Workload",
    "check_api",
    "decode_elements",
    "dequantize",
    "expert_matrix",
    "hookimpl",
    "minimum_slot",
    "nearest",
    "parse_manifest",
    "parse_requirement",
    "read_manifest",
    "scale_slot",
    "weight_slots",
    "write_group_rounded",
    "write_rounded",
]

_NAMES = {
    "all2all": "All2All Dispatched DispatchHandle",
    "attention": (
        "AttentionBackend AttentionBatch AttentionCall AttentionMetadata AttentionSpec CaptureGrade StepPlanner "
        "StoreCall"
    ),
    "builds": "KernelBuild",
    "cache": "GROUP_SIZE NULL_PAGE NVFP4 CacheLayout CacheSpec Latest Plane Region Retention Scaling Span",
    "cache_layouts": "GroupScaledLayout PlainLayout ScaledLayout write_group_rounded write_rounded",
    "cache_users": "CacheUser CacheUsers",
    "communicator": "Collectives Communicator GroupMember Parallel RankGroup",
    "context": "BuildContext Counter EngineLimits Gauge Histogram Metrics Resources Scope",
    "contributions": "Contribution Form Preference",
    "dequantization": "decode_elements dequantize minimum_slot scale_slot",
    "device": "DeviceInfo Fp8Format MemorySnapshot NumaNode",
    "drafter": "NO_DRAFT DraftCall Drafter DrafterArgs",
    "elements": "Element TableElement",
    "errors": (
        "CapacityError CheckpointError ConfigError EngineDeadError EngineError HardpointError ManifestError "
        "PlatformError PluginConflictError PluginError PluginLoadError RequestError SelectionError "
        "UnknownNameError nearest"
    ),
    "experts": "ActivationFormat BatchedExpertsCall BatchedExpertsKernel ExpertsCall ExpertsKernel expert_matrix",
    "families": "FAMILIES Family Stability",
    "hooks": "Choice ConfigChange EngineInfo HookSpecs hookimpl",
    "latent": "LatentBackend LatentCall LatentSpec LatentStoreCall",
    "layers": (
        "AdjustedArgs AttentionArgs BlockArgs EmbeddingArgs GatedDeltaNetArgs KimiDeltaAttentionArgs LayerArgs "
        "LinearArgs LinearAttentionArgs Mamba2Args MLAArgs MLPArgs MoEArgs NormArgs QueryScalingArgs RopeArgs "
        "RouterArgs SparseIndexerArgs StackArgs WeightSlot"
    ),
    "linear": "LinearCall LinearKernel Quantized",
    "manifest": "ENTRY_POINT_GROUP MANIFEST_NAME ConfigKey ConfigValue Manifest Namesake parse_manifest read_manifest",
    "parsers": (
        "ContentDelta ParserArgs ParserEvent ReasoningDelta ReasoningParser ToolCallDelta ToolCallEnd "
        "ToolCallStart ToolParser"
    ),
    "platform": "NO_DEVICE CapturedGraph EagerGraphEngine GraphEngine Memory MemoryTag Platform StepLimits",
    "quant": "QuantSpec Scale SpecPattern",
    "quantization": (
        "CacheScales CheckpointTensors Dim ExpertStack MethodRequest Module QuantizationMethod Scheme StoredTensor "
        "TensorInfo weight_slots"
    ),
    "reasons": "Reason",
    "requests": (
        "All2AllWorkload AttentionWorkload CommunicatorWorkload DrafterWorkload ElementWorkload ExpertsWorkload "
        "Feature LatentWorkload LayerWorkload LinearWorkload ModelWorkload OpWorkload Phase PlatformWorkload "
        "QuantizationWorkload ReasoningParserWorkload Request ScalarValue ToolParserWorkload Workload"
    ),
    "requirements": "CheckContext Requirement TokensRequirement parse_requirement",
    "sharding": "ShardPlan ShardSlice",
    "step": "ForwardStep",
    "structured": "StructuredOutput StructureKind",
    "versions": "API_VERSION MANIFEST_SCHEMA ApiVersion check_api",
}
"""The public names of each module."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # a type checker that sees __getattr__ takes every name for a public one

    def __getattr__(name: str) -> object:
        """Import the module of a public name, or such a module itself; it is the package's attribute from then on."""
        from importlib import import_module

        if name in _NAMES:
            return import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        """Every public name and each module that has some, imported yet or not."""
        return sorted({*globals(), *__all__, *_NAMES})
