"""Inputs of a mixture of experts whose routing no rounding decides.

A router compares scores. Two right layers that differ by a rounding choose other experts where two scores are equal but
for that, and no bound on errors holds across the choice. So hidden states are drawn along the rows of the router's
weight, which are orthonormal: a token's logits are different whole numbers. Drawn tokens are kept where the choice is
the same for all logits within MARGIN of these, as interval arithmetic in float64 shows.

Axes: T tokens, E experts, H hidden, G groups.
"""

from __future__ import annotations

import torch

from hardpoint_plugin_api import MoEArgs, RouterArgs

MARGIN = 2.0**-4
"""More than rounding to bfloat16 takes a logit off by: of inputs and weights 2^-5, of a logit of at most 8 2^-6."""


def router_weight(args: MoEArgs) -> torch.Tensor:
    """[E, H] with orthonormal rows, float32; the same for equal arguments. H is at least E."""
    experts, hidden = args.router.num_experts, args.hidden_size
    drawn = torch.randn(hidden, experts, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rows, _ = torch.linalg.qr(drawn)
    return torch.as_tensor(rows).T.float().contiguous()


def correction_bias(router: RouterArgs) -> torch.Tensor:
    """Float32 [E], of the size of the scores that it corrects; the same for equal arguments."""
    return 0.3 * torch.randn(router.num_experts, generator=torch.Generator().manual_seed(6))


def certain_tokens(args: MoEArgs, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Float32 [T, H]: hidden states whose experts are certain."""
    weight, experts = router_weight(args).double(), args.router.num_experts
    found = torch.empty(0, args.hidden_size, dtype=torch.float64)
    while len(found) < tokens:
        levels = torch.rand(4 * tokens, experts, generator=generator).argsort(-1).double() - experts // 2
        noise = torch.randn(4 * tokens, args.hidden_size, generator=generator, dtype=torch.float64)
        drawn = noise - noise @ weight.T @ weight + levels @ weight
        found = torch.cat([found, drawn[is_certain(args.router, drawn @ weight.T)]])
    return found[:tokens].float()


def is_certain(router: RouterArgs, logits: torch.Tensor) -> torch.Tensor:
    """Bool [T]: whether the choice is the same for all logits that are within MARGIN of ``logits``, float64 [T, E]."""
    low, high = _scores(router, logits)
    if router.bias:
        low, high = (bound + correction_bias(router).double() for bound in (low, high))
    if router.num_groups == 1:
        return _are_apart(low, high, router.top_k)
    summed = 2 if router.bias else 1
    groups = [bound.unflatten(-1, (router.num_groups, -1)) for bound in (low, high)]
    lowest, highest = (bound.topk(min(summed, bound.shape[-1]), dim=-1).values.sum(-1) for bound in groups)
    certain = _are_apart(lowest, highest, router.top_groups)
    best = torch.zeros_like(lowest, dtype=torch.bool)
    best.scatter_(-1, (lowest + highest).topk(router.top_groups, dim=-1).indices, True)
    low, high = (bound.masked_fill(~best.unsqueeze(-1), float("-inf")).flatten(-2) for bound in groups)
    return certain & _are_apart(low, high, router.top_k)


def _scores(router: RouterArgs, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bounds of what is compared."""
    if router.scoring == "sigmoid":
        return (logits - MARGIN).sigmoid(), (logits + MARGIN).sigmoid()
    if not router.bias:  # softmax keeps the logits' order
        return logits - MARGIN, logits + MARGIN
    scores, most = logits.softmax(-1), torch.tensor(2 * MARGIN, dtype=torch.float64).exp()
    return scores / most, scores * most


def _are_apart(low: torch.Tensor, high: torch.Tensor, count: int) -> torch.Tensor:
    """Whether the ``count`` best of each row are the same wherever values lie between the bounds, [T, n] each."""
    if count == low.shape[-1]:
        return torch.ones(len(low), dtype=torch.bool)
    order = (low + high).argsort(-1, descending=True)
    best, others = low.gather(-1, order[:, :count]), high.gather(-1, order[:, count:])
    return best.amin(-1) > others.amax(-1)
