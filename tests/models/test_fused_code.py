"""Transformers' code between layers that runs as fused ops, and code that is nearly the same and must not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig

from hardpoint import SamplingParams
from hardpoint.models.transformers_code.model import TransformersLM
from hardpoint.models.transformers_code.residuals import Residuals
from hardpoint.models.transformers_code.rotary_tables import is_tabulable
from tests.support.checkpoints import check_tokens_equal, random_prompts
from tests.support.engines import small_llm
from tests.support.transformers_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

FUSED = {
    "llama": (3, 3),
    "qwen3": (3, 3),  # norms of heads
    "qwen3_moe": (3, 3),
    "smollm3": (3, 3),  # some layers do not rotate
    "stablelm": (3, 0),  # rotates a part of each head; layer norms
    "gemma2": (3, 0),  # norms what layers add
    "hunyuan_v1_dense": (0, 0),  # norms heads behind the rotation
    "ministral3": (0, 0),  # scales queries of far tokens
    "diffllama": (0, 0),  # attends twice
}


def fused_of(folder: Path, model: Any) -> tuple[int, int]:
    """How much of the model runs as fused ops; its tokens equal those of Transformers' own run."""
    with small_llm(folder, model_impl="transformers", max_model_len=64) as llm:
        report = cast(TransformersLM, llm.core.blueprint.model).report
        prompts = random_prompts(3, 30, seed=1)
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        lines = "\n".join(report.lines())
        assert ("in one op" in lines) == bool(report.fused["attention"])
        return report.fused["attention"], report.fused["layers"]


@pytest.mark.parametrize("kind", FUSED)
def test_code_that_computes_the_same_is_fused(kind: str, tmp_path: Path) -> None:
    assert fused_of(tmp_path, write_tiny(tmp_path, kind)) == FUSED[kind]


def attention(change: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    """Attention as Llama's code has it, with ``change`` before the call: (q, k, v, positions) -> (q, k, v)."""

    def forward(
        self: Any, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k, v = change(q, k, v, kwargs["position_ids"])
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling_llama.eager_attention_forward
        )
        y, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), weights

    return forward


ATTENTION: dict[str, tuple[Callable[..., Any], int]] = {
    "the same": (lambda q, k, v, positions: (q, k, v), 3),
    "clamped": (lambda q, k, v, positions: (q, k, v.clamp(-8, 8)), 0),
    "far queries scaled": (lambda q, k, v, p: (q * (1 + (p // 4096)[:, None, :, None]).to(q.dtype), k, v), 0),
    "values that are keys": (lambda q, k, v, positions: (q, k, k), 0),
    "queries and keys exchanged": (lambda q, k, v, positions: (k.repeat_interleave(2, 1), q[:, ::2], v), 0),
}


@pytest.mark.parametrize("change", ATTENTION)
def test_attention_is_recognised_by_what_it_computes(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, count = ATTENTION[change]
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", attention(function))
    model = write_tiny(tmp_path, "llama")
    assert fused_of(tmp_path, model)[0] == count


def layer(combine: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A decoder layer as Llama's code has it, but for the last sum: (residual, made, the layer's input) -> sum."""

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        made, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        residual = hidden_states + made
        return combine(residual, self.mlp(self.post_attention_layernorm(residual)), hidden_states)

    return forward


LAYERS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "the same": (lambda residual, made, x: residual + made, 3),
    "scaled": (lambda residual, made, x: residual + 0.5 * made, 0),
    "clamped": (lambda residual, made, x: (residual + made).clamp(-50, 50), 0),
    "its input again": (lambda residual, made, x: residual + made + 0.1 * x, 0),
}


@pytest.mark.parametrize("change", LAYERS)
def test_layers_are_recognised_by_what_they_compute(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    combine, count = LAYERS[change]
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", layer(combine))
    model = write_tiny(tmp_path, "llama")
    assert fused_of(tmp_path, model) == (3, count)


def body(skip: bool) -> Callable[..., Any]:
    """A body that adds what the first layer was given, and what it made, to the last layer's output."""

    def forward(self: Any, input_ids: torch.Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        first = x = self.embed_tokens(input_ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=position_ids
        )
        angles = self.rotary_emb(x, position_ids=position_ids)
        second = None
        for each in self.layers:
            x = each(x, attention_mask=mask, position_ids=position_ids, position_embeddings=angles)
            second = x if second is None else second
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x + first + second if skip else x))

    return forward


@pytest.mark.parametrize("skip", [False, True])
def test_hidden_states_that_other_code_reads_are_left_alone(
    skip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two layers are given what is read later; the last one's sum is not left to the norm."""
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", body(skip))
    model = write_tiny(tmp_path, "llama")
    assert fused_of(tmp_path, model) == (3, 1 if skip else 3)


@pytest.mark.parametrize("others", [False, True])
def test_a_layer_owns_what_it_alone_reads(others: bool) -> None:
    first, second = (nn.Linear(3, 3, device="meta") for _ in range(2))
    seen, x = Residuals(), torch.empty(2, 3, device="meta")
    with seen.watched([first, second]):
        y = first(x)
        second(y)
        seen.read((x, y) if others else ())
    assert seen.owners() == (set() if others else {first, second})
    assert seen.next_of() == ({} if others else {first: second})


def angles(change: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines as Llama's code has them, of ``change``d positions: (module, positions, x) -> positions."""

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = change(self, position_ids.float(), x)[..., None] * self.inv_freq.float()
        both = torch.cat((turned, turned), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    return forward


def growing(module: Any, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    module.inv_freq = module.inv_freq * 1
    return positions


ANGLES: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "the same": (lambda module, positions, x: positions, True),
    "capped": (lambda module, positions, x: positions.clamp(max=20), True),
    "from the first token on": (lambda module, positions, x: positions - positions[:, :1], False),
    "of hidden states": (lambda module, positions, x: positions + x.float().mean(-1), False),
    "of buffers that change": (growing, False),
}


@pytest.mark.parametrize("change", ANGLES)
def test_angles_are_tabulated_where_a_position_alone_makes_them(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, tabulable = ANGLES[change]
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", angles(function))
    module = modeling_llama.LlamaRotaryEmbedding(config)
    assert is_tabulable(module, dict(module.named_buffers()), torch.float32, 64) == tabulable


@pytest.mark.parametrize("reader", [False, True], ids=["fused alone", "and other code"])
def test_angles_are_computed_for_other_code_alone(
    reader: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in which every reader is fused call nothing of the rotary module; others get what it computes."""
    model = write_tiny(tmp_path, "llama")
    own, tokens = modeling_llama.LlamaRotaryEmbedding.forward, list[int]()

    def noted(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        tokens.append(position_ids.shape[1])
        return own(self, x, position_ids)

    if reader:
        plain = modeling_llama.LlamaAttention.forward

        def first_clamped(self: Any, *args: Any, **kwargs: Any) -> Any:
            y, weights = plain(self, *args, **kwargs)
            return (y.clamp(-1e6, 1e6) if self.layer_idx == 0 else y), weights

        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", first_clamped)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", noted)
    with small_llm(tmp_path, model_impl="transformers", max_model_len=64, enforce_eager=True) as llm:
        report = cast(TransformersLM, llm.core.blueprint.model).report
        assert (report.fused["attention"], report.tabulated) == (2 if reader else 3, 1)
        tokens.clear()
        prompts = random_prompts(3, 30, seed=1)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert bool(tokens) == reader
    for prompt, output in zip(prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)
