"""Acme's hooks. Imported when the plugin is in use, before any of its targets."""

from __future__ import annotations

import logging

from hardpoint_plugin_api import EngineInfo, hookimpl

logger = logging.getLogger(__name__)


@hookimpl
def hardpoint_engine_started(engine: EngineInfo) -> None:
    """Say hello."""
    logger.info("Acme serves %s on %s", engine.model, engine.device.name)


@hookimpl
def hardpoint_conformance() -> list[object]:
    """Core's trials of formats, parsers, models and layers, with samples of Acme's."""
    from acme_hp.samples import LAYER_KINDS, MODEL_SAMPLES, SAMPLES, TOOL_SAMPLES
    from hardpoint.conformance.families.layers import LayerTrials
    from hardpoint.conformance.families.models import ModelTrials
    from hardpoint.conformance.families.parsers import ParserTrials
    from hardpoint.conformance.families.quantization import QuantizationTrials

    parsers = ParserTrials("tool_parser", TOOL_SAMPLES)
    return [QuantizationTrials(SAMPLES), parsers, ModelTrials(MODEL_SAMPLES), LayerTrials(LAYER_KINDS)]
