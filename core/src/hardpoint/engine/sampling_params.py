"""The sampling parameters of one request: how its tokens are chosen, when it ends, and which log-probabilities it
returns.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set, ValuesView
from dataclasses import InitVar, dataclass
from itertools import chain
from numbers import Integral, Real
from typing import Any

from hardpoint.engine.outputs import RequestOutputKind
from hardpoint.engine.structured_outputs import StructuredOutputsParams
from hardpoint.engine.vllm_params import takes_vllm_names
from hardpoint_plugin_api import RequestError, StructuredOutput


@takes_vllm_names
@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request. Names, defaults and ranges are vLLM's.

    ``n``: the number of completions per prompt. ``temperature`` 0, or below 1e-5, is greedy. ``top_k`` 0 (or -1),
    ``top_p`` 1 and ``min_p`` 0 switch each truncation off. ``seed`` makes a request repeatable, whatever else is in the
    batch; None: the engine chooses one.

    ``repetition_penalty`` above 1 makes tokens of prompt and output less likely. ``presence_penalty`` and
    ``frequency_penalty`` above 0 do so for tokens of the output, once and by their count (ops/apply_penalties.py has
    the formulas). ``logit_bias`` is added to the logits of single tokens. Only ``allowed_token_ids`` are sampled, and
    no token that would complete a text of ``bad_words``; where the two exclude every token within an output, token 0 is
    taken.

    ``stop``: texts that end the output, and are cut from it unless ``include_stop_str_in_output``. ``stop_token_ids``
    end it too. The first ``min_tokens`` tokens never end it. ``max_tokens`` None: up to the context length.

    ``logprobs``: return the log-probability of each sampled token, and of this many of the likeliest (-1: all).
    ``prompt_logprobs``: the same for the prompt. They are the model's own, before penalties, bias, temperature and
    truncation.

    ``return_routed_experts``: return the experts that a mixture of experts chose for each token, with the end of the
    output (``CompletionOutput.routed_experts``); the engine must have ``enable_return_routed_experts``. Not to be
    combined with ``stop``, which is found behind the engine core: use ``stop_token_ids``.

    ``structured``: constrain the output to a schema, pattern or grammar. The output ends when nothing more may follow,
    regardless of ``min_tokens`` and ``ignore_eos``. An output that ``max_tokens`` or ``stop`` cuts off may be
    incomplete. Not to be combined with ``allowed_token_ids`` and ``bad_words``. ``structured_outputs`` is vLLM's way to
    write it.

    ``truncate_prompt_tokens``: of a longer prompt use this many tokens (-1: as many as the engine takes); the last ones
    where ``truncation_side`` is "left", the first ones where it is "right".

    ``output_kind``: the content of a stream's outputs; ignored by calls that return whole outputs.

    vLLM's other parameters are answered: see ``engine/vllm_params.py``.

    Raises RequestError for a value of the wrong type or out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    structured: StructuredOutput | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    structured_outputs: InitVar[StructuredOutputsParams | Mapping[str, Any] | None] = None

    def __post_init__(self, structured_outputs: object) -> None:
        if structured_outputs is not None:
            if self.structured is not None:
                raise RequestError("structured and structured_outputs are the same; give one")
            object.__setattr__(self, "structured", StructuredOutputsParams.read(structured_outputs).constraint)
        for name, (is_valid, valid) in _VALID.items():
            if not is_valid(getattr(self, name)):
                raise RequestError(f"{name} must be {valid}, got {getattr(self, name)!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens, got {self.min_tokens} and {self.max_tokens}")
        if self.return_routed_experts and self.stop_texts:
            raise RequestError("return_routed_experts does not go with stop texts; end the output by stop_token_ids")
        for name in ("allowed_token_ids", "bad_words") if self.structured is not None else ():
            if getattr(self, name):
                raise RequestError(f"{name} may forbid what structured demands; leave one of them out")

    def check_vocabulary(self, size: int, bad_words: Collection[Collection[int]] = ()) -> None:
        """Raise RequestError, naming the parameter, for what a vocabulary of ``size`` tokens does not hold.

        ``bad_words`` are the token sequences of that parameter, none empty.
        """
        given: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids or (),
            "bad_words": chain.from_iterable(bad_words),
        }
        for name, ids in given.items():
            for token in ids:
                if not 0 <= token < size:
                    raise RequestError(f"{name} names token {token}, outside the model's vocabulary of {size}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > size:
                raise RequestError(f"{name} must be at most the model's vocabulary of {size}, got {count}")

    def of_completion(self, index: int, seed: int) -> SamplingParams:
        """The parameters of one of ``n`` completions, seeded by ``seed`` of all. The first has the prompt's scores."""
        own = object.__new__(SamplingParams)  # what is valid here is valid there, and checks take longer than all else
        own.__dict__.update(self.__dict__, n=1, seed=derived_seed(seed, index))
        if index:
            own.__dict__["prompt_logprobs"] = None
        return own

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """True where the likeliest token is always taken."""
        return self.temperature < _LEAST_TEMPERATURE


def derived_seed(seed: int, index: int) -> int:
    """The seed of a request's completion ``index``, from 0 to 2**63 - 1; that of completion 0 is the request's own.

    Hashed, so that the completions of requests with neighbouring seeds have none in common.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


Check = Callable[[Any], bool]
_LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken, as vLLM does: quotients of float32 overflow."""
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_MOST_BIAS = 1e6
"""Far beyond any logit, and far from where sums and quotients of float32 overflow: masked tokens must stay masked."""


def _is_a(value: object, kind: type) -> bool:
    if type(value) is int or (type(value) is float and kind is Real):  # nearly always; ABCs take ten times as long
        return True
    return isinstance(value, kind) and not isinstance(value, bool)


def _integer(low: int, high: float = math.inf) -> Check:
    return lambda value: _is_a(value, Integral) and low <= value <= high


def _number(low: float, high: float = _FLOAT32_MAX) -> Check:
    return lambda value: _is_a(value, Real) and low <= value <= high


def _above_zero(high: float = _FLOAT32_MAX) -> Check:
    return lambda value: _number(0, high)(value) and value > 0


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _all(check: Check) -> Check:
    kinds = Sequence, Set, Mapping, ValuesView  # no array of numpy, which has no truth value
    return lambda values: isinstance(values, kinds) and not isinstance(values, str) and all(map(check, values))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_bias(value: Any) -> bool:
    bound = _number(-_MOST_BIAS, _MOST_BIAS)
    return isinstance(value, Mapping) and _all(_integer(0))(value) and _all(bound)(value.values())


_VALID: dict[str, tuple[Check, str]] = {
    "n": (_integer(1), "at least 1"),
    "temperature": (_number(0), "0 or more (0 is greedy)"),
    "top_p": (_above_zero(1), "above 0 and at most 1"),
    "top_k": (_integer(-1, 2**31 - 1), "a positive number, or 0 or -1 for all"),
    "min_p": (_number(0, 1), "from 0 to 1"),
    "seed": (_optional(_integer(0, 2**63 - 1)), "from 0 to 2**63 - 1, or None"),
    "stop": (_optional(lambda value: _is_text(value) or _all(_is_text)(value)), "texts that are not empty"),
    "stop_token_ids": (_optional(_all(_integer(0))), "token ids in a list, tuple or set, or None"),
    "max_tokens": (_optional(_integer(1)), "at least 1, or None"),
    "ignore_eos": (_is_bool, "True or False"),
    "skip_special_tokens": (_is_bool, "True or False"),
    "include_stop_str_in_output": (_is_bool, "True or False"),
    "repetition_penalty": (_number(1e-3, 1e3), "from 0.001 to 1000 (1 is off)"),
    "presence_penalty": (_number(-2, 2), "from -2 to 2"),
    "frequency_penalty": (_number(-2, 2), "from -2 to 2"),
    "logit_bias": (_optional(_is_bias), "a mapping of token ids to numbers from -1e6 to 1e6, or None"),
    "bad_words": (
        _optional(_all(lambda word: _is_text(word) and word.strip(" "))),
        "texts that are not blank, or None",
    ),
    "allowed_token_ids": (
        _optional(lambda ids: _all(_integer(0))(ids) and len(ids) > 0),
        "some token ids in a list, tuple or set, or None",
    ),
    "min_tokens": (_integer(0, 2**31 - 1), "from 0 to 2**31 - 1"),
    "logprobs": (_optional(_integer(-1)), "0 or more, -1 for all, or None"),
    "prompt_logprobs": (_optional(_integer(-1)), "0 or more, -1 for all, or None"),
    "return_routed_experts": (_is_bool, "True or False"),
    "structured": (_optional(lambda value: isinstance(value, StructuredOutput)), "a StructuredOutput, or None"),
    "truncate_prompt_tokens": (
        _optional(lambda value: _integer(-1)(value) and value != 0),
        "at least 1, -1 for the longest prompt, or None",
    ),
    "truncation_side": (lambda value: value in ("left", "right"), "left or right"),
    "output_kind": (lambda value: isinstance(value, RequestOutputKind), "a RequestOutputKind"),
}
"""The valid values of each parameter, as a check and in words."""
