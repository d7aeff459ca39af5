"""Acme's drafts: a sequence goes on as it began."""

from __future__ import annotations

import torch

from hardpoint_plugin_api import NO_DRAFT, DraftCall, Drafter


class AcmeDrafter(Drafter):
    """Proposes what followed the first place where the last token stood."""

    def propose(self, call: DraftCall) -> torch.Tensor:
        rows = []
        for slot, length in zip(call.slots.tolist(), call.lengths.tolist(), strict=True):
            known = call.tokens[slot, :length].tolist()
            first = known.index(known[-1]) + 1
            drafts = known[first : first + self.args.num_drafts]
            rows.append(drafts + [NO_DRAFT] * (self.args.num_drafts - len(drafts)))
        return torch.tensor(rows, dtype=torch.int64, device=call.tokens.device)
