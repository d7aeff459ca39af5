"""Prompt lookup: a sequence is likely to go on as it did where its last tokens stood before."""

from __future__ import annotations

import torch

from hardpoint_plugin_api import NO_DRAFT, DraftCall, Drafter


class NgramDrafter(Drafter):
    """Proposes what followed the earliest of the longest matches of the sequence's end (Saxena, "Prompt lookup
    decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding).

    Matches have from ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens.
    """

    def propose(self, call: DraftCall) -> torch.Tensor:
        """See Drafter. Work and memory grow with the longest sequence."""
        args, lengths = self.args, call.lengths[:, None]
        history = call.tokens[call.slots, : call.longest]
        ends = torch.arange(call.longest, device=history.device)
        matched = self._matched(history, lengths).masked_fill(ends >= lengths, 0)
        longest, end = matched.max(dim=1, keepdim=True)  # the first among equals
        places = end + torch.arange(args.num_drafts, device=history.device)
        is_draft = (places < lengths) & (longest >= args.prompt_lookup_min)
        return torch.where(is_draft, history.gather(1, places.clamp(max=call.longest - 1)).long(), NO_DRAFT)

    def _matched(self, history: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """How many tokens before each place of ``history`` [N, L] are those at the end of the sequence; at most
        ``prompt_lookup_max``."""
        small = self.args.prompt_lookup_max <= torch.iinfo(torch.uint8).max
        matched = torch.zeros_like(history, dtype=torch.uint8 if small else torch.int32)
        goes_on = torch.ones_like(history, dtype=torch.bool)
        for back in range(1, min(self.args.prompt_lookup_max, history.shape[1] - 1) + 1):
            last = history.gather(1, (lengths - back).clamp(min=0))
            goes_on[:, :back] = False
            goes_on[:, back:] &= history[:, :-back] == last
            matched += goes_on
        return matched
