"""Requests: ranges are refused with one clear line, and records survive JSON."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from headrace.errors import UsageError
from headrace.runtime.request import (
    Alternative,
    Completion,
    Delta,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", 101),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", False),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 2),
        ("repeat_penalty", 0),
        ("repeat_penalty", 10.5),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 10**400),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("logprobs", 51),
        ("logprobs", True),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop", 7),
        ("stop", ("x",) * 17),
        ("logit_bias", [1]),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("ignore_eos", 1),
    ],
)
def test_a_value_out_of_range_is_a_usage_error_of_one_line(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        given: dict[str, Any] = {name: value}
        SamplingParams(**given)
    message = str(caught.value)
    assert message.startswith(name) and "got" in message and "allowed" in message
    assert "\n" not in message and len(message) < 140


def test_the_message_names_both_limits() -> None:
    with pytest.raises(UsageError, match=r"^top_p: got 1\.5, allowed is a number above 0 to 1$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(UsageError, match=r"a whole number from 0 to 18446744073709551615$"):
        SamplingParams(seed=2**64)
    with pytest.raises(UsageError, match=r"a whole number from 1$"):
        SamplingParams(max_tokens=-3)


def test_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=100, top_p=1, min_p=1, repeat_penalty=10, seed=2**64 - 1)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, max_tokens=1, logprobs=50)


def test_values_are_normalised() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3))  # type: ignore[arg-type]
    assert type(params.temperature) is float and type(params.top_k) is int
    stops: Any = "\n\n"
    assert SamplingParams(stop=stops).stop == ("\n\n",)
    stops = ["a", "b"]
    assert SamplingParams(stop=stops).stop == ("a", "b")


def test_params_are_hashable_and_keep_their_own_bias() -> None:
    bias = {7: 1.0, 3: -1}
    params = SamplingParams(logit_bias=bias)
    bias[7] = 50.0
    assert dict(params.logit_bias) == {3: -1.0, 7: 1.0}
    assert params == SamplingParams(logit_bias={3: -1.0, 7: 1.0})
    assert len({params, SamplingParams(logit_bias={3: -1.0, 7: 1.0}), SamplingParams()}) == 2
    assert pickle.loads(pickle.dumps(params)) == params


def test_the_user_goes_before_the_model_and_the_model_before_us() -> None:
    model = {"temperature": 0.7, "top_k": 20.0, "repeat_penalty": 1.1}
    params = SamplingParams.resolve({"temperature": 0.0, "top_p": None, "seed": 5}, model)
    assert params == SamplingParams(temperature=0.0, top_k=20, repeat_penalty=1.1, seed=5)
    assert SamplingParams.resolve({}) == SamplingParams()


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown sampling parameter 'topk'; known are.*top_k"):
        SamplingParams.resolve({"topk": 1})
    with pytest.raises(UsageError, match="default of the model 'seed'; known are temperature"):
        SamplingParams.resolve({}, {"seed": 1})


def test_a_seed_is_drawn_once_and_kept() -> None:
    params = SamplingParams(temperature=1).seeded()
    assert params.seed is not None and params.seeded() is params
    assert len({SamplingParams().seeded().seed for _ in range(20)}) > 1


def test_answers_become_json() -> None:
    entry = TokenLogprob(5, "é", -0.5, (Alternative(5, "é", -0.5), Alternative(6, "e", -1.5)))
    timings = Timings(
        prefill_tokens=100, prefill_s=0.5, first_token_s=0.6, decode_tokens=2, decode_s=0.0
    )
    answer = Completion("é", (5,), "stop", 2, Usage(100, 1), timings, 9, (entry,))
    back = json.loads(json.dumps(answer.to_json()))
    assert back["usage"] == {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101}
    assert back["timings"]["prefill_tokens_per_s"] == 200.0
    assert back["timings"]["decode_tokens_per_s"] == 0.0
    assert back["logprobs"][0]["top"][1] == {"token_id": 6, "text": "e", "logprob": -1.5}
    assert (back["finish_reason"], back["stop_reason"], back["seed"]) == ("stop", 2, 9)
    plain = Completion("", (), "length", None, Usage(1, 0), timings, None)
    assert "logprobs" not in plain.to_json()
    piece = Delta("x", (1, 2), finish_reason="length")
    assert json.loads(json.dumps(piece.to_json()))["token_ids"] == [1, 2]
