"""Bad input is refused before anything is sent, by an error that names field, value and limit."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavepp import AsyncClient, Client, ClientSecurity, Sampling, errors
from wavepp.testing import FakeController
from wavepp_proto import limits

BIG = 2**31


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    async with FakeController() as controller:
        yield controller


async def refusal(controller: FakeController, prompt: Any, **options: Any) -> errors.WaveppError:
    """The error that `prefill` and `stream` both raise; nothing may have reached the controller."""
    async with AsyncClient(controller.address) as client:
        with pytest.raises(errors.WaveppError) as by_prefill:
            await client.prefill(prompt, **options)
        with pytest.raises(type(by_prefill.value)) as by_stream:
            client.stream(prompt, **options)
    assert by_prefill.value.fields == by_stream.value.fields
    assert controller.requests == []
    return by_prefill.value


@pytest.mark.parametrize(
    "prompt",
    [[], (), "", b"", bytearray(), np.array([], dtype=np.int32), range(0), array("i")],
    ids=["list", "tuple", "text", "bytes", "bytearray", "numpy", "range", "array"],
)
async def test_prompt_is_refused_when_empty(controller: FakeController, prompt: Any) -> None:
    error = await refusal(controller, prompt)
    assert type(error) is errors.EmptyPrompt
    assert error.fields == {"field": "prompt", "value": "0", "limit": "1"}


@pytest.mark.parametrize(
    ("prompt", "index", "value"),
    [
        ([1, -1, 2], 1, -1),
        ([1, 2, BIG], 2, BIG),
        ([10**30], 0, 10**30),
        (np.array([3, BIG], dtype=np.int64), 1, BIG),
        (np.array([-7, 3], dtype=np.int8), 0, -7),
        (np.array([2**63], dtype=np.uint64), 0, 2**63),
        (b"\x01\0\0\0\xff\xff\xff\xff", 1, -1),
    ],
    ids=["negative", "over-int32", "over-int64", "int64", "int8", "uint64", "packed"],
)
async def test_token_is_refused_with_its_index_when_out_of_range(
    controller: FakeController, prompt: Any, index: int, value: int
) -> None:
    error = await refusal(controller, prompt)
    assert type(error) is errors.TokenOutOfRange
    assert error.fields == {"field": "prompt", "index": str(index), "value": str(value), "limit": str(BIG - 1)}


@pytest.mark.parametrize(
    ("prompt", "index", "value"),
    [
        ([1, 2.5], 1, "2.5"),
        ([1, "a"], 1, "'a'"),
        ([[1, 2]], 0, "[1, 2]"),
        (np.array([1.0]), None, "(1,) float64"),
        (np.ones((1, 4), dtype=np.int32), None, "(1, 4) int32"),
        (b"\x01\0\0", None, "3"),
        (7, None, "() int64"),
        (None, None, "() object"),
    ],
    ids=["float", "text", "nested", "float-array", "matrix", "half-a-token", "number", "none"],
)
async def test_prompt_is_refused_when_it_is_no_row_of_integers(
    controller: FakeController, prompt: Any, index: int | None, value: str
) -> None:
    error = await refusal(controller, prompt)
    assert type(error) is errors.InvalidRequest
    expected = {"field": "prompt", "value": value} | ({} if index is None else {"index": str(index)})
    assert {name: error.fields[name] for name in expected} == expected


async def test_prompt_is_refused_when_longer_than_the_wire_allows(controller: FakeController) -> None:
    error = await refusal(controller, np.zeros(limits.MAX_PROMPT_TOKENS + 1, dtype=np.int32))
    assert type(error) is errors.PromptTooLong
    assert error.fields == {
        "field": "prompt",
        "value": str(limits.MAX_PROMPT_TOKENS + 1),
        "limit": str(limits.MAX_PROMPT_TOKENS),
    }


@pytest.mark.parametrize(
    ("options", "field", "limit"),
    [
        ({"deadline": -1}, "deadline", "86400.0"),
        ({"deadline": 0}, "deadline", "86400.0"),
        ({"deadline": float("nan")}, "deadline", "86400.0"),
        ({"deadline": float("inf")}, "deadline", "86400.0"),
        ({"deadline": 86_401}, "deadline", "86400.0"),
        ({"deadline": "soon"}, "deadline", "86400.0"),
        ({"priority": 10}, "priority", "9"),
        ({"priority": -10}, "priority", "-9"),
        ({"priority": 1.5}, "priority", None),
        ({"cache_salt": "x" * 257}, "cache_salt", "256"),
        ({"cache_salt": 5}, "cache_salt", None),
        ({"adapter": "x" * 257}, "adapter", "256"),
        ({"pipeline": "x" * 257}, "pipeline", "256"),
        ({"pipeline": ""}, "pipeline", None),
        ({"request_id": "x" * 129}, "request_id", "128"),
        ({"request_id": ""}, "request_id", None),
        ({"sampling": {"temperature": 0.5}}, "sampling", None),
        ({"sampling": Sampling(temperature=-0.1)}, "temperature", "0"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature", None),
        ({"sampling": Sampling(top_logprobs=65)}, "top_logprobs", "64"),
        ({"sampling": Sampling(top_logprobs=-1)}, "top_logprobs", "0"),
        ({"sampling": Sampling(seed=-1)}, "seed", "0"),
        ({"sampling": Sampling(seed=2**64)}, "seed", None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("prompt", [[1], "text"], ids=["tokens", "text"])
async def test_option_is_refused_by_name_before_anything_is_tokenized_or_sent(
    controller: FakeController, prompt: Any, options: dict[str, Any], field: str, limit: str | None
) -> None:
    error = await refusal(controller, prompt, **options)
    assert type(error) is errors.InvalidRequest
    assert error.fields["field"].removeprefix("sampling.") == field
    assert limit is None or error.fields["limit"] == limit
    assert controller.describe_calls == 0


KNOWN = "and sampling=wavepp.Sampling(...), which takes temperature, seed, top_logprobs, full_logits"


async def test_unknown_option_is_a_type_error_that_names_the_known_ones(controller: FakeController) -> None:
    one: dict[str, Any] = {"temperature": 0.5, "deadline": 3, "top_k": 1}
    async with AsyncClient(controller.address) as client:
        with pytest.raises(TypeError) as by_prefill:
            await client.prefill([1], **one)
        with pytest.raises(TypeError) as by_stream:
            client.stream([1], **one)
        with pytest.raises(TypeError) as by_many:
            client.prefill_many([[1]], request_id="mine")  # type: ignore[call-arg]
    assert str(by_prefill.value) == str(by_stream.value)
    assert str(by_stream.value) == (
        "prefill() has no option 'temperature', 'top_k'; it has adapter, cache_salt, deadline, pipeline, priority, "
        f"request_id {KNOWN}"
    )
    assert str(by_many.value) == (
        f"prefill_many() has no option 'request_id'; it has adapter, cache_salt, deadline, pipeline, priority {KNOWN}"
    )
    assert controller.requests == []


async def test_concurrency_is_refused_when_it_allows_nothing(controller: FakeController) -> None:
    async with AsyncClient(controller.address) as client:
        with pytest.raises(errors.InvalidRequest) as caught:
            client.prefill_many([[1]], concurrency=0)
    assert caught.value.fields == {"field": "concurrency", "value": "0", "limit": "1"}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"address": "nowhere"}, "address"),
        ({"address": "host:99999"}, "address"),
        ({"deadline": 0}, "deadline"),
        ({"grace": -1}, "grace"),
    ],
    ids=repr,
)
def test_client_setting_is_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        AsyncClient(**settings)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    ("tls", "said", "fields"),
    [
        (ClientSecurity(cert=Path("c")), "tls.cert needs tls.ca", {"field": "tls_cert", "value": "c"}),
        (ClientSecurity(key=Path("k")), "tls.key needs tls.ca", {"field": "tls_key", "value": "k"}),
        (
            ClientSecurity(cert=Path("c"), key=Path("k")),
            "tls.cert needs tls.ca",
            {"field": "tls_cert", "value": "c"},
        ),
        (ClientSecurity(server_name="n"), "tls.server_name needs tls.ca", {"field": "tls_server_name", "value": "n"}),
    ],
    ids=["cert", "key", "pair", "server name"],
)
@pytest.mark.parametrize("client", [AsyncClient, Client])
def test_client_is_refused_when_tls_would_be_plain_text(
    client: type[AsyncClient | Client], tls: ClientSecurity, said: str, fields: dict[str, str]
) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client("127.0.0.1:1", tls=tls)
    assert caught.value.message == f"{said}: without it the connection would be plain text"
    assert caught.value.fields == fields
