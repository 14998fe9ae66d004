"""Bad input is refused before anything is sent, by an error that names field, value and limit."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from wavepp import AsyncClient, Client, ClientSecurity, Sampling, errors
from wavepp._types import RequestOptions, SharedOptions
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
        ({"pipeline": 5}, "pipeline", None),
        ({"request_id": "x" * 129}, "request_id", "128"),
        ({"request_id": ""}, "request_id", None),
        ({"sampling": {"temperature": 0.5}}, "sampling", None),
        ({"sampling": Sampling(temperature=-0.1)}, "temperature", "0"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature", None),
        ({"sampling": Sampling(top_logprobs=65)}, "top_logprobs", "64"),
        ({"sampling": Sampling(top_logprobs=-1)}, "top_logprobs", "0"),
        ({"sampling": Sampling(top_logprobs="3")}, "top_logprobs", None),  # type: ignore[arg-type]
        ({"sampling": Sampling(temperature="hot")}, "temperature", None),  # type: ignore[arg-type]
        ({"sampling": Sampling(full_logits="no")}, "full_logits", None),  # type: ignore[arg-type]
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


SURROGATES = ["\udcff", "a\ud800b"]
"""What Python makes of a byte that is no UTF-8, and of an escape in JSON that is half a character."""


def text_options(options: type[SharedOptions | RequestOptions]) -> list[str]:
    """The options that take text, whatever they will be."""
    hints = get_type_hints(options)
    return sorted(name for name, hint in hints.items() if str in (hint, *get_args(hint)))


def test_options_that_take_text_are_found() -> None:
    assert text_options(SharedOptions) == ["adapter", "cache_salt", "pipeline"]
    assert text_options(RequestOptions) == ["adapter", "cache_salt", "pipeline", "request_id"]
    assert [name for name, hint in get_type_hints(Sampling).items() if hint is str] == []


@pytest.mark.parametrize("text", SURROGATES, ids=ascii)
@pytest.mark.parametrize("option", text_options(RequestOptions))
async def test_option_is_refused_by_name_when_it_is_not_utf_8(
    controller: FakeController, option: str, text: str
) -> None:
    error = await refusal(controller, [1], **{option: text})
    assert type(error) is errors.InvalidRequest
    at = 0 if text == SURROGATES[0] else 1
    assert error.fields == {"field": option, "value": ascii(text[at]), "index": str(at), "limit": "UTF-8"}
    assert error.message == f"{option} is not UTF-8: character {at} is {text[at]!a}"


@pytest.mark.parametrize("option", text_options(SharedOptions))
async def test_option_of_many_is_refused_for_each_when_it_is_not_utf_8(controller: FakeController, option: str) -> None:
    options: Any = {option: "\udcff"}
    async with AsyncClient(controller.address) as client:
        outcomes = [outcome async for outcome in client.prefill_many([[1], [2]], **options)]
    assert [(one.index, one.error and one.error.fields["field"]) for one in outcomes] == [(0, option), (1, option)]


@pytest.mark.parametrize("text", SURROGATES, ids=ascii)
async def test_text_is_refused_before_it_is_tokenized_when_it_is_not_utf_8(
    controller: FakeController, text: str
) -> None:
    error = await refusal(controller, f"Hi {text}")
    at = 3 if text == SURROGATES[0] else 4
    assert type(error) is errors.InvalidRequest
    assert error.fields == {"field": "prompt", "value": ascii(text[at - 3]), "index": str(at), "limit": "UTF-8"}
    assert controller.describe_calls == 0


class Letters:
    """A tokenizer whose ids are the letters' numbers."""

    def encode(self, text: str, /) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], /) -> str:
        return "".join(map(chr, token_ids))


async def test_many_go_on_when_one_of_them_cannot_be_sent(controller: FakeController) -> None:
    prompts: list[Any] = ["ab", "\udcff", memoryview(b"abcd")[:3], {"text": "c"}, Unshaped(), "cd"]
    async with AsyncClient(controller.address, tokenizer=Letters()) as client:
        many = client.prefill_many(prompts, concurrency=2)
        outcomes = sorted([outcome async for outcome in many], key=lambda one: one.index)
    assert [one.error and (one.error.reason, one.error.fields["field"]) for one in outcomes] == [
        None, *[("INVALID_REQUEST", "prompt")] * 4, None,
    ]  # fmt: skip
    assert [list(one.request.token_ids[::4]) for one in controller.requests] == [[97, 98], [99, 100]]


class Unshaped:
    """What numpy cannot make an array of."""

    def __array__(self, *_: object, **__: object) -> object:
        raise ValueError("no shape")


async def test_every_other_byte_of_a_view_is_a_prompt_as_the_whole_is(controller: FakeController) -> None:
    spread = bytes(byte for one in array("i", [5, 700]).tobytes() for byte in (one, 0xFF))
    async with AsyncClient(controller.address) as client:
        await client.prefill(memoryview(spread)[::2])
    assert [one.request.token_ids for one in controller.requests] == [array("i", [5, 700]).tobytes()]


@pytest.mark.parametrize("value", ["\udcff", 5], ids=ascii)
async def test_call_is_refused_by_field_when_a_name_cannot_be_sent(controller: FakeController, value: Any) -> None:
    async with AsyncClient(controller.address) as client:
        with pytest.raises(errors.InvalidRequest) as of_cancel:
            await client.cancel(value)
        with pytest.raises(errors.InvalidRequest) as of_describe:
            await client.describe(value)
    assert of_cancel.value.fields["field"] == "request_id"
    assert of_describe.value.fields["field"] == "pipeline"
    assert (controller.cancelled_ids, controller.describe_calls) == ([], 0)


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
        ({"address": "\udcff:1"}, "address"),
        ({"deadline": 0}, "deadline"),
        ({"grace": -1}, "grace"),
        ({"proxy": "nowhere"}, "proxy"),
    ],
    ids=repr,
)
def test_client_setting_is_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        AsyncClient(**{"address": "127.0.0.1:1"} | settings)
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
