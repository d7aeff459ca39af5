"""Backends that are preferred for some numbers of decodes are tried at the ends of these ranges."""

from __future__ import annotations

from dataclasses import replace

from hardpoint.conformance.families.attention_situations import Situation, batch_names
from hardpoint.conformance.site import Site, Subject
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import Preference, TokensRequirement

PREFERRED = (
    Preference(9, (TokensRequirement(33, 512, "decode"),)),
    Preference(9, (TokensRequirement(1, 7, "prefill"),)),
)


def test_the_ends_of_preferred_ranges_are_tried() -> None:
    site = Site.open(discover(), "cpu")
    offer = next(o for o in site.plugins.offers("attention", "causal") if o.contribution.name == "reference")
    plain = Subject.load(offer, site)
    subject = replace(plain, offer=replace(offer, contribution=replace(offer.contribution, preferred=PREFERRED)))
    assert [name for name in batch_names(subject) if name not in batch_names(plain)] == ["decodes 33", "decodes 512"]
    situation = Situation.of(
        {
            "span": ("full", 0),
            "block_size": 16,
            "heads": (4, 2),
            "head_size": 64,
            "dtype": "float32",
            "kv_dtype": "float32",
            "soft_cap": False,
            "sinks": False,
            "alibi": False,
            "values": "normal",
            "batch": "decodes 512",
            "shared": False,
            "padding": 0,
            "slack": 0,
        }
    )
    pieces = situation.pieces(subject.tokens, seed=0)
    assert len(pieces) == 512
    assert {piece.query for piece in pieces} == {1}
