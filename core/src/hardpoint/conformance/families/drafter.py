"""Trials of drafters: drafts have their form, follow from the call alone, and leave it as it is.

No draft is wrong: what verifies them decides. So nothing is compared with a reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import LIMITS, Subject
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint_plugin_api import NO_DRAFT, Contribution, DraftCall, Drafter, DrafterArgs, DrafterWorkload

_VOCABULARY = 50
_NUM_SLOTS = 12
_LENGTHS = {"one": (1,), "short": (1, 2, 3, 4, 5), "mixed": (40, 1, 300, 7, 64, 65), "long": (4000,)}
"""Lengths of the requests of each case."""
_NUM_DRAFTS = (1, 4, 9)


class DrafterTrials:
    """The generator of the family ``drafter``."""

    family = "drafter"

    def serves(self, contribution: Contribution) -> bool:
        """All: the contract says what drafts look like, whoever makes them."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Sequences that repeat themselves and others, of several lengths, for several numbers of drafts."""
        for num_drafts in _NUM_DRAFTS:
            workload = DrafterWorkload(num_drafts=num_drafts)
            for name, lengths in _LENGTHS.items():
                case = f"{name}/drafts={num_drafts}"
                if refused := subject.refuses(workload):
                    yield Trial(case, unsupported=refused)
                    continue
                probe = DrafterProbe(subject, num_drafts, lengths, plan.seed_of(f"drafter/{case}"))
                checks = [
                    Check("values", probe.values, decisive=True),
                    Check("inputs", probe.inputs),
                    Check("repetition", probe.repetition),
                    Check("alone", probe.alone),
                ]
                yield Trial(case, checks, workload=workload)


@dataclass(frozen=True)
class DrafterProbe:
    """One call, and what makes the drafter that is asked."""

    subject: Subject
    num_drafts: int
    lengths: tuple[int, ...]
    seed: int

    def open(self) -> Drafter:
        """A drafter for one more engine."""
        offer, site = self.subject.offer, self.subject.site
        ctx = site.context("float32").for_plugin(offer.plugin)
        drafter: Drafter = self.subject.target(ctx, DrafterArgs(num_drafts=self.num_drafts, vocab_size=_VOCABULARY))
        ctx.resources.allocate(site.device)
        return drafter

    def call(self, behind: int = 0) -> DraftCall:
        """Half of the sequences repeat a phrase. ``behind`` stands behind the ends of all."""
        generator = torch.Generator().manual_seed(self.seed)
        longest = max(self.lengths)
        tokens = torch.full((_NUM_SLOTS, LIMITS.max_model_len), behind, dtype=torch.int32)
        slots = torch.randperm(_NUM_SLOTS, generator=generator)[: len(self.lengths)]
        for number, (slot, length) in enumerate(zip(slots.tolist(), self.lengths, strict=True)):
            sequence = torch.randint(0, _VOCABULARY, (length,), generator=generator)
            if number % 2 == 0:
                sequence = sequence[: 1 + length // 3].repeat(3)[:length]
            tokens[slot, :length] = sequence.int()
        device = self.subject.site.device
        return DraftCall(tokens.to(device), slots.to(device), torch.tensor(self.lengths, device=device), longest)

    def values(self) -> Finding:
        """``values``: int64 [N, k] on the call's device; tokens of the vocabulary, then NO_DRAFT."""
        call = self.call()
        drafts, wanted = self.open().propose(call), (len(self.lengths), self.num_drafts)
        if drafts.dtype != torch.int64 or tuple(drafts.shape) != wanted or drafts.device != call.tokens.device:
            text = f"are {drafts.dtype} {list(drafts.shape)} on {drafts.device}, not int64 {list(wanted)}"
            return Finding.failed("form", "drafts", f"{text} on {call.tokens.device}")
        for number, row in enumerate(drafts.tolist()):
            proposed = [token for token in row if token != NO_DRAFT]
            where = f"request {number}, of {self.lengths[number]} tokens"
            if outside := [token for token in proposed if not 0 <= token < _VOCABULARY]:
                return Finding.failed("vocabulary", where, f"{outside[0]} is no token of {_VOCABULARY}")
            if row[: len(proposed)] != proposed:
                return Finding.failed("gap", where, f"{row}: a draft stands behind NO_DRAFT")
        return Finding(compared=drafts.numel())

    def repetition(self) -> Finding:
        """``repetition``: an equal call gives equal drafts, after other calls and from another instance."""
        drafter = self.open()
        first = drafter.propose(self.call()).clone()
        other = replace(self, seed=self.seed + 1)
        drafter.propose(other.call())
        for who, again in (("the same", drafter.propose(self.call())), ("another", self.open().propose(self.call()))):
            if not torch.equal(first, again):
                return Finding.failed("repetition", f"{who} instance", f"{again.tolist()} after {first.tolist()}")
        return Finding()

    def alone(self) -> Finding:
        """``alone``: drafts of a request depend on its own tokens: not on others, nor on what stands behind its end."""
        drafter, call = self.open(), self.call()
        together = drafter.propose(call).clone()
        if not torch.equal(drafter.propose(self.call(behind=_VOCABULARY - 1)), together):
            return Finding.failed("behind", "tokens behind the end", "change the drafts")
        for number, length in enumerate(self.lengths):
            some = slice(number, number + 1)
            alone = drafter.propose(replace(call, slots=call.slots[some], lengths=call.lengths[some], longest=length))
            if not torch.equal(alone, together[some]):
                text = f"{alone.tolist()} alone, {together[some].tolist()} beside others"
                return Finding.failed("alone", f"request {number}", text)
        return Finding()

    def inputs(self) -> Finding:
        """``inputs``: the call's tensors stay as they are."""
        call = self.call()
        kept = call.tokens.clone(), call.slots.clone(), call.lengths.clone()
        self.open().propose(call)
        for name, before, after in zip(
            ("tokens", "slots", "lengths"), kept, (call.tokens, call.slots, call.lengths), strict=True
        ):
            if not torch.equal(before, after):
                return Finding.failed("mutated", name, "is not what it was before the call")
        return Finding()
