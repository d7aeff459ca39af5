"""Samples for the conformance kit: Acme's checkpoint format, and calls as Acme's models write them."""

from __future__ import annotations

import torch

from hardpoint.conformance.families.parser_samples import ParserSample, SampleCall, tool
from hardpoint.conformance.families.quantization_samples import Sample, Written
from hardpoint_plugin_api import ContentDelta


def _groups(rows: int, columns: int, generator: torch.Generator) -> Written:
    codes = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    steps = 0.01 + torch.rand(rows, columns // 32, generator=generator) / 50
    return {"codes": codes, "steps": steps}, codes.float() * steps.repeat_interleave(32, dim=1)


SAMPLES = {"acme_groups": (Sample("groups", {"quant_method": "acme_groups", "group_size": 32}, _groups),)}

_TOOLS = (tool("clock", zone={"type": "string"}), tool("stop"))
_CLOCK = '@clock{"zone": "UTC"}'
TOOL_SAMPLES = {
    "acme": (
        ParserSample(
            "calls",
            f"Late.\n{_CLOCK}\n@stop{{}}",
            (ContentDelta("Late.\n"), SampleCall("clock", '{"zone": "UTC"}'), SampleCall("stop")),
            _TOOLS,
        ),
        ParserSample("no call", "@clock{zone}\nmail@stop{}\n", (ContentDelta("@clock{zone}\nmail@stop{}\n"),), _TOOLS),
    )
}
