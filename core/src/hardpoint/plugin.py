"""Core as a plugin: the first one, through the same door. Its manifest is ``hardpoint.toml`` beside this file."""

from __future__ import annotations

from hardpoint_plugin_api import hookimpl


@hookimpl
def hardpoint_conformance() -> list[object]:
    """Core's own generators of conformance trials."""
    from hardpoint.conformance.families.all2all import All2AllTrials
    from hardpoint.conformance.families.attention import AttentionTrials
    from hardpoint.conformance.families.communicator import CommunicatorTrials
    from hardpoint.conformance.families.drafter import DrafterTrials
    from hardpoint.conformance.families.element import ElementTrials
    from hardpoint.conformance.families.experts import ExpertsTrials
    from hardpoint.conformance.families.latent import LatentTrials
    from hardpoint.conformance.families.layers import LayerTrials
    from hardpoint.conformance.families.linear import LinearTrials
    from hardpoint.conformance.families.models import ModelTrials
    from hardpoint.conformance.families.ops import OpTrials
    from hardpoint.conformance.families.parsers import ParserTrials
    from hardpoint.conformance.families.platform import PlatformTrials
    from hardpoint.conformance.families.quantization import QuantizationTrials

    return [
        PlatformTrials(),
        OpTrials(),
        LayerTrials(),
        AttentionTrials(),
        LatentTrials(),
        LinearTrials(),
        ExpertsTrials(),
        CommunicatorTrials(),
        All2AllTrials(),
        QuantizationTrials(),
        ElementTrials(),
        ModelTrials(),
        DrafterTrials(),
        ParserTrials("tool_parser"),
        ParserTrials("reasoning_parser"),
    ]
