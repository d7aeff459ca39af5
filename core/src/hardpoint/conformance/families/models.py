"""Trials of models: tiny checkpoints, and the logits that they mean, step by step as an engine takes them.

Truth are the logits of the sample's reference in float64; its own error is that of the reference in float32, which is
what the model is run in. Everything but the model's own code is served by core's references.

Axes: T tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.checkpoint.safetensors_files import SafetensorsFiles
from hardpoint.conformance.families.draft_steps import DRAFTED, why_no_drafts
from hardpoint.conformance.families.model_samples import ModelSample, Reference, transformers_samples
from hardpoint.conformance.families.step_memory import StepMemory, num_found, rows_of
from hardpoint.conformance.families.steps import Piece
from hardpoint.conformance.memory import equal_bits
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.layers import CausalLM
from hardpoint.layers.loading import load_weights
from hardpoint.models.family import ChosenModel
from hardpoint.ops.comparison import Comparison
from hardpoint.ops.error_model import ErrorModel, compare
from hardpoint_plugin_api import ConfigError, Contribution, Feature, HardpointError, ModelWorkload
from hardpoint_plugin_api.families import ANY

ERRORS = ErrorModel(scale="row", finest=2.0**-20)
"""Transformers computes norms, routing and rotary angles in float32, also in float64 models: no truth is finer."""
_DTYPE = "float32"
_OF_ANY = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Cohere2ForCausalLM")
"""Architectures by which an implementation of any is tried: a plain one, a mixture, and one with other norms."""
_PROMPT, _GREEDY = 41, 8
_CUTS = ((41,), (16, 16, 9), (1, 7, 8, 24, 1), (33, *(1,) * 8))
_MOST_DRAFTS = max(DRAFTED)
_BATCH = ((1, 19, 5, 16), (1, 1, 1, 1), (2, 2, 2, 2))
"""Tokens of each request in each step, decodes first."""


class ModelTrials:
    """The generator of the family ``model``. ``samples`` are by architecture, the ``of`` of the contribution."""

    family = "model"

    def __init__(self, samples: Mapping[str, Sequence[ModelSample]] | None = None) -> None:
        self._samples = samples

    def serves(self, contribution: Contribution) -> bool:
        """Whether there is a reference for the architecture: a plugin's own, or Transformers'."""
        return bool(self._of(str(contribution.of)))

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Each sample of the architecture."""
        of = str(subject.offer.contribution.of)
        workload = ModelWorkload(of=of, dtype=_DTYPE)
        for number, sample in enumerate(self._of(of)):
            if reason := subject.refuses(workload):
                yield Trial(sample.name, unsupported=reason, workload=workload)
                continue
            probe = ModelProbe(subject, sample, plan.seed_of(f"{of}/{sample.name}"))
            checks = [
                Check("loads", probe.loads, decisive=True),
                Check("values", probe.values),
                Check("chunks", probe.chunks),
                Check("batch", probe.batch),
                Check("greedy", probe.greedy),
            ]
            if plan.includes(0, number):
                checks.append(Check("drafts", probe.drafts))
            if Feature.BATCH_INVARIANT in subject.features:
                checks.append(Check("batch-invariant", probe.batch_invariant))
            yield Trial(sample.name, checks, workload=workload)

    def _of(self, architecture: str) -> Sequence[ModelSample]:
        if self._samples is None:
            if architecture != ANY:
                return transformers_samples(architecture)
            samples = ((name, sample) for name in _OF_ANY for sample in transformers_samples(name))
            return tuple(replace(sample, name=f"{name}/{sample.name}") for name, sample in samples)
        return self._samples.get(architecture, ())


@dataclass(frozen=True)
class _Opened:
    """A sample that was written and read, and what became of it: the model with its weights, or an error."""

    reference: Reference
    vocab_size: int
    ctx: Context
    model: Any = None
    error: HardpointError | None = None


class ModelProbe:
    """One sample: the model under trial with its weights, and the reference."""

    def __init__(self, subject: Subject, sample: ModelSample, seed: int) -> None:
        self.subject, self.sample, self.seed = subject, sample, seed

    @cached_property
    def _opened(self) -> _Opened:
        return self._open()

    @cached_property
    def _invariant(self) -> _Opened:
        """The model, with parts that are batch invariant."""
        return self._open(batch_invariant=True)

    @cached_property
    def _drafted(self) -> _Opened:
        """The model, as an engine builds it that verifies drafts."""
        return self._open(num_drafts=_MOST_DRAFTS)

    def _open(self, *, batch_invariant: bool = False, num_drafts: int = 0) -> _Opened:
        site = self.subject.site
        with tempfile.TemporaryDirectory(prefix="hardpoint-sample-") as name:
            folder = Path(name)
            reference = self.sample.write(folder, self.seed % 2**31)
            config = HFConfig.read(folder)
            ctx = site.context(_DTYPE, batch_invariant=batch_invariant, num_drafts=num_drafts)
            opened = _Opened(reference, config.text.integer("vocab_size"), ctx)
            try:
                model: object = ChosenModel.of(self.subject.offer, self.subject.target, config).build(ctx)
                if isinstance(model, CausalLM):
                    ctx.resources.allocate(site.device)
                    load_weights(model, model.weight_names, SafetensorsFiles(folder), site.device)
            except HardpointError as error:
                return replace(opened, error=error)
        return replace(opened, model=model)

    def _ids(self, tokens: int, number: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + number)
        return torch.randint(0, self._opened.vocab_size, (tokens,), generator=generator).tolist()

    def loads(self) -> Finding:
        """``loads``: the model is built from the config, and every tensor of the checkpoint has its place."""
        opened = self._opened
        if isinstance(opened.error, ConfigError) or (opened.error and self.sample.may_be_refused):
            return Finding.not_claimed("refused", str(opened.error))
        if opened.error:
            return Finding.failed("refused", self.sample.name, f"{type(opened.error).__name__}: {opened.error}")
        if not isinstance(opened.model, CausalLM):
            return Finding.failed(
                "structure", "target", f"must build a CausalLM, built a {type(opened.model).__name__}"
            )
        return Finding()

    @torch.inference_mode()
    def _logits(
        self, prompts: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]], opened: _Opened | None = None
    ) -> list[torch.Tensor]:
        """Logits [T, vocab] of each prompt, taken in steps: ``cuts[s][i]`` tokens of prompt i in step s."""
        opened = opened or self._opened
        model, ctx = opened.model, opened.ctx
        ends = [0] * len(prompts)
        pieces, chosen = [], []
        for counts in cuts:
            starts, ends = ends, [end + count for end, count in zip(ends, counts, strict=True)]
            pieces.append(tuple(map(Piece, counts, ends)))
            chosen.append([prompt[a:b] for prompt, a, b in zip(prompts, starts, ends, strict=True)])
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        memory = StepMemory(ctx, self.subject.site.device, pieces)
        for (_, step), rows, counts in zip(memory.steps(), chosen, cuts, strict=True):
            ids = torch.tensor([i for row in rows for i in row], device=self.subject.site.device)
            rows_of_each = model.logits(model.hidden(ids, step)).split(list(counts))
            for logits, of_one in zip(rows_of_each, found, strict=True):
                of_one.append(logits.clone())
        return [torch.cat(rows) for rows in found]

    def _judged(self, where: str, ids: Sequence[int], actual: torch.Tensor) -> Comparison:
        """``actual`` [T, vocab]: the logits of the last T of ``ids``."""
        own, truth = (self._opened.reference(ids, dtype)[-len(actual) :] for dtype in (torch.float32, torch.float64))
        return compare(where, actual, own, truth, ERRORS, self.subject.site.device)

    def values(self) -> Finding:
        """``values``: the logits of every position of a prompt, in one step."""
        ids = self._ids(_PROMPT)
        (actual,) = self._logits([ids], [[len(ids)]])
        return Finding.of(self._judged("logits", ids, actual))

    def chunks(self) -> Finding:
        """``chunks``: the prompt in chunks, and by one token at a time, has the logits of the whole."""
        ids, found = self._ids(_PROMPT), Comparison()
        for cuts in _CUTS[1:]:
            (actual,) = self._logits([ids], [[count] for count in cuts])
            found.add(self._judged(f"steps of {', '.join(map(str, cuts))}", ids, actual))
        return Finding.of(found)

    @property
    def _prompts(self) -> list[list[int]]:
        return [self._ids(sum(counts), number) for number, counts in enumerate(zip(*_BATCH, strict=True), 1)]

    def batch(self) -> Finding:
        """``batch``: requests in one step, and in two further ones, have the logits that each has alone."""
        prompts, found = self._prompts, Comparison()
        for ids, logits in zip(prompts, self._logits(prompts, _BATCH), strict=True):
            found.add(self._judged(f"a request of {len(ids)} tokens", ids, logits))
        return Finding.of(found)

    def batch_invariant(self) -> Finding:
        """``batch-invariant``: requests have the bits alone that they have in a batch, where all parts promise so."""
        prompts = self._prompts
        together = self._logits(prompts, _BATCH, self._invariant)
        for number, (ids, logits) in enumerate(zip(prompts, together, strict=True)):
            (alone,) = self._logits([ids], [[counts[number]] for counts in _BATCH], self._invariant)
            if not equal_bits(alone, logits):
                return Finding.failed("batch-variant", f"a request of {len(ids)} tokens", "has other bits in a batch")
        return Finding()

    def greedy(self) -> Finding:
        """``greedy``: the likeliest token each time is the reference's, or one as likely within the bounds."""
        ids = self._ids(_PROMPT)
        for _ in range(_GREEDY):
            (actual,) = self._logits([ids], [[_PROMPT], *([1] for _ in ids[_PROMPT:])])
            ids.append(int(actual[-1].argmax()))
        own, truth = (self._opened.reference(ids[:-1], dtype).double() for dtype in (torch.float32, torch.float64))
        for at, (row, reference) in enumerate(zip(truth[_PROMPT - 1 :], own[_PROMPT - 1 :], strict=True)):
            token, best = ids[_PROMPT + at], int(row.argmax())
            limit = (
                ERRORS.multiple * (reference - row).abs().max() + ERRORS.floor_peak * ERRORS.finest * row.abs().max()
            )
            if row[best] - row[token] > 2 * limit:
                return Finding.failed("greedy", f"token {at}", f"is {token}, the reference's likeliest is {best}")
        return Finding()

    @torch.inference_mode()
    def drafts(self) -> Finding:
        """``drafts``: requests of which drafts are refused have the logits that they have without these drafts."""
        opened, device, pieces = self._drafted, self.subject.site.device, DRAFTED[_MOST_DRAFTS]
        if opened.error:
            return Finding.not_claimed("refused", str(opened.error))
        if reason := why_no_drafts(opened.ctx):
            return Finding(unsupported=reason)
        ids = self._ids(sum(piece.query for step in pieces for piece in step))
        tokens, logits, found = torch.tensor(ids, device=device), [], Comparison()
        for rows, step in StepMemory(opened.ctx, device, pieces).steps():
            logits.append(opened.model.logits(opened.model.hidden(tokens[rows], step)).clone())
        whole = torch.cat(logits)
        for number, rows_of_one in enumerate(rows_of(pieces)):
            own = torch.tensor(rows_of_one[num_found(pieces, number) :], device=device)
            found.add(self._judged(f"request {number}", [ids[row] for row in rows_of_one], whole[own]))
        return Finding.of(found)
