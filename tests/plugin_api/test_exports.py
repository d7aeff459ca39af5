"""The public door: what plugins may import, and that opening it costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hardpoint_plugin_api

PUBLIC = """
API_VERSION ActivationFormat AdjustedArgs All2All All2AllWorkload ApiVersion AttentionArgs AttentionBackend
AttentionBatch AttentionCall AttentionMetadata AttentionSpec AttentionWorkload BatchedExpertsCall BatchedExpertsKernel
BlockArgs BuildContext CacheLayout CacheScales CacheSpec CacheUser CacheUsers CapacityError CaptureGrade CapturedGraph
CheckContext CheckpointError CheckpointTensors Choice Collectives Communicator CommunicatorWorkload ConfigChange
ConfigError ConfigKey ConfigValue ContentDelta Contribution Counter DeviceInfo Dim DispatchHandle Dispatched DraftCall
Drafter DrafterArgs DrafterWorkload ENTRY_POINT_GROUP EagerGraphEngine Element ElementWorkload EmbeddingArgs
EngineDeadError EngineError EngineInfo EngineLimits ExpertStack ExpertsCall ExpertsKernel ExpertsWorkload FAMILIES
Family Feature Form ForwardStep Fp8Format GatedDeltaNetArgs Gauge GraphEngine GroupMember HardpointError Histogram
GROUP_SIZE GroupScaledLayout NVFP4 write_group_rounded
HookSpecs KimiDeltaAttentionArgs LatentBackend LatentCall LatentSpec LatentStoreCall LatentWorkload Latest LayerArgs
LayerWorkload LinearArgs LinearAttentionArgs LinearCall LinearKernel LinearWorkload MANIFEST_NAME MANIFEST_SCHEMA
MLAArgs MLPArgs Mamba2Args Manifest ManifestError Memory MemorySnapshot MemoryTag MethodRequest Metrics MoEArgs
ModelWorkload Module NO_DEVICE NO_DRAFT NULL_PAGE Namesake NormArgs NumaNode KernelBuild OpWorkload Parallel ParserArgs
ParserEvent Phase PlainLayout Plane Platform PlatformError PlatformWorkload PluginConflictError PluginError
PluginLoadError Preference QuantSpec QuantizationMethod QuantizationWorkload Quantized QueryScalingArgs RankGroup Reason
ReasoningDelta ReasoningParser ReasoningParserWorkload Region Request RequestError Requirement Resources Retention
RopeArgs RouterArgs ScalarValue Scale ScaledLayout Scaling Scheme Scope SelectionError ShardPlan ShardSlice Span
SparseIndexerArgs SpecPattern Stability StackArgs StepLimits StepPlanner StoreCall StoredTensor StructureKind
StructuredOutput TableElement TensorInfo TokensRequirement ToolCallDelta ToolCallEnd ToolCallStart ToolParser
ToolParserWorkload UnknownNameError WeightSlot Workload check_api decode_elements dequantize expert_matrix hookimpl
minimum_slot nearest parse_manifest parse_requirement read_manifest scale_slot weight_slots write_rounded
"""
"""A name that disappears from here breaks a plugin somewhere; one that is added stays for good."""


def test_the_public_names() -> None:
    assert sorted(hardpoint_plugin_api.__all__) == sorted(PUBLIC.split())
    assert len(set(hardpoint_plugin_api.__all__)) == len(hardpoint_plugin_api.__all__)
    assert not [name for name in hardpoint_plugin_api.__all__ if not hasattr(hardpoint_plugin_api, name)]


def test_nothing_else_of_its_own_stands_in_the_door() -> None:
    modules = {p.stem for p in Path(hardpoint_plugin_api.__file__).parent.glob("*.py")}
    public = {name for name in vars(hardpoint_plugin_api) if not name.startswith("_")}
    assert public - modules - set(hardpoint_plugin_api.__all__) == {"TYPE_CHECKING"}


def test_type_checkers_and_programs_find_a_name_in_the_same_module() -> None:
    """The imports for type checkers, and the table by which names are imported on use."""
    written = Path(hardpoint_plugin_api.__file__).read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(written)) if isinstance(node, ast.ImportFrom)]
    checked = {
        name.name: node.module.removeprefix("hardpoint_plugin_api.")
        for node in imports
        if node.module and node.module.startswith("hardpoint_plugin_api.")
        for name in node.names
    }
    assert checked == hardpoint_plugin_api._HOMES
    assert set(checked) == set(hardpoint_plugin_api.__all__)


def test_a_name_is_imported_from_its_module_when_it_is_used() -> None:
    """Each is the module's own, ``dir`` lists all of them, and one that does not exist is an error at the import."""
    program = (
        "import sys, hardpoint_plugin_api as api\n"
        "assert set(api.__all__) <= set(dir(api))\n"
        "assert not [m for m in sys.modules if m.startswith('hardpoint_plugin_api.')]\n"
        "from hardpoint_plugin_api import MLPArgs\n"
        "from hardpoint_plugin_api.layers import MLPArgs as own\n"
        "assert MLPArgs is own is vars(api)['MLPArgs']\n"
        "assert 'hardpoint_plugin_api.platform' not in sys.modules\n"
        "from hardpoint_plugin_api import MLPArg\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: cannot import name 'MLPArg' from 'hardpoint_plugin_api'" in done.stderr


def test_its_modules_are_attributes_without_an_import_of_their_own() -> None:
    """As they were when the package imported all of them: a plugin may write ``hardpoint_plugin_api.quant.Scale``."""
    program = (
        "import hardpoint_plugin_api as api\n"
        "assert {'quant', 'layers', 'versions'} <= set(dir(api))\n"
        "assert api.quant.Scale is api.Scale\n"
        "assert not hasattr(api, 'quants')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_it_imports_no_torch() -> None:
    """Every module of it, in a fresh interpreter in which nothing else has imported torch before."""
    program = (
        "import importlib, pkgutil, sys, hardpoint_plugin_api as api\n"
        "names = [m.name for m in pkgutil.iter_modules(api.__path__)]\n"
        "for name in names: importlib.import_module(f'hardpoint_plugin_api.{name}')\n"
        "heavy = {m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'triton', 'hardpoint'}\n"
        "sys.exit(str(heavy) if heavy or len(names) < 15 else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
