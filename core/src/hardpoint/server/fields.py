"""Fields that the bodies of several endpoints share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.structured_outputs import StructuredOutputsParams
from hardpoint.server.errors import ApiError
from hardpoint_plugin_api import StructuredOutput

MAX_STOPS = 64
"""Stop texts of a request, and stop tokens: each token's text is searched for all of them."""
MAX_LOGPROBS = 20
"""As in OpenAI's API."""
MAX_BIASES = 300
"""As in OpenAI's API."""
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 64, 64
"""Limits of one request, for which the engine has room in every slot."""

BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class ProtocolModel(BaseModel):
    """A part of a request's body. Values are not converted. Fields it does not name are kept for take_unknown."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)


class UnknownPart(ProtocolModel):
    """A part that is ignored as a whole, such as a tool that a provider runs."""

    type: str


def take_unknown(part: object, place: str = "") -> list[str]:
    """Remove the fields that a body's models do not name; return their names, such as ``messages[0].mood``.

    A part that is ignored as a whole is named with its type, and stays.
    """
    if isinstance(part, UnknownPart):
        return [f"{place}.{part.type}"]
    if isinstance(part, list):
        parts = ((number, each) for number, each in enumerate(part) if type(each) is not int)  # token ids are many
        return [name for number, each in parts for name in take_unknown(each, f"{place}[{number}]")]
    if not isinstance(part, ProtocolModel):
        return []
    prefix = f"{place}." if place else ""
    found = [prefix + name for name in part.model_extra or ()]
    part.__pydantic_extra__ = {}
    for name, value in part.__dict__.items():
        if value is not None:  # of some sixty fields a request has few
            found += take_unknown(value, prefix + name)
    return found


class StructuredOutputs(ProtocolModel):
    """A constraint on the output, as vLLM writes it: one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class SamplingFields(ProtocolModel):
    """The parameters of SamplingParams, under its names. None means the model's own, or the protocol's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def structure(self, form: StructuredOutput | None) -> StructuredOutput | None:
        """The constraint: ``form``, which ``response_format`` is, or vLLM's fields. Raises ApiError for several."""
        guided = {kind: getattr(self, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
        said = [{kind: value} for kind, value in guided.items() if value is not None]
        if self.structured_outputs is not None:
            said.append(self.structured_outputs.model_dump(exclude_none=True, by_alias=True))
        if len(said) + (form is not None) > 1:
            raise ApiError(
                400,
                "response_format, structured_outputs and guided_* each say what the output must be; give one",
                param="structured_outputs",
            )
        return StructuredOutputsParams.read(said[0]).constraint if said else form

    def sampling_params(self, defaults: SamplingParams, **own: Any) -> SamplingParams:
        """``defaults`` with what the request says, and with what its endpoint makes of the rest.

        Raises RequestError for a value out of range.
        """
        said = {name: getattr(self, name) for name in _NAMES if getattr(self, name) is not None}
        if self.logit_bias is not None:
            said["logit_bias"] = _by_token(self.logit_bias)
        return replace(defaults, **(said | own))


_NAMES = tuple(
    f.name for f in fields(SamplingParams) if f.name in SamplingFields.model_fields and f.name != "logit_bias"
)


def _by_token(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) < 12):
            raise ApiError(400, f"logit_bias: {token!r:.80} is no token id", param="logit_bias")
    return {int(token): value for token, value in bias.items()}


class TreatmentFields(ProtocolModel):
    """How a request is treated beside others: ``priority``, lower first; ``cache_salt``, whose prefixes it shares."""

    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None


class VllmFields(ProtocolModel):
    """Fields of vLLM. ``request_id`` becomes a part of the answer's id; ``return_tokens_as_token_ids`` names the tokens
    of log-probabilities ``token_id:N``. ``add_special_tokens``: whether the prompt gets the tokenizer's.
    ``return_routed_experts`` is SGLang's.
    """

    request_id: Annotated[str, Field(max_length=128, pattern="^[!-~]+$")] | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    return_routed_experts: bool | None = None


class IgnoredFields(ProtocolModel):
    """Fields that are accepted, because clients send them, and change nothing: see docs/serving.md."""

    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None


class StreamOptions(ProtocolModel):
    """``include_usage``: a last event with the whole request's usage; ``continuous_usage_stats``: each has one."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
