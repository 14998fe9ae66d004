"""Token ids in every form people have them, as the packed bytes that travel.

Owns the checks on prompts (empty, range, count, shape) and the packing to little-endian int32. Does
not own text (`_tokenizer.py`) or the other fields of a request (`_request.py`). Called once a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from wavepp_proto import limits
from wavepp_proto.errors import EmptyPrompt, InvalidRequest, PromptTooLong, TokenOutOfRange

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ids = npt.NDArray[np.integer[Any]]

TOKEN_BYTES: Final = 4
MAX_TOKEN_ID: Final = 2**31 - 1


def pack(prompt: Sequence[int] | bytes | bytearray | memoryview | Ids) -> bytes:
    """`prompt` as packed little-endian int32, checked.

    Bytes (and a memoryview of bytes) are taken as packed already; anything else is a one-dimensional
    run of integers of any width. Raises EmptyPrompt, TokenOutOfRange (with the index), PromptTooLong
    or InvalidRequest.
    """
    ids = _integers(prompt)
    if not ids.size:
        raise EmptyPrompt("the prompt has no tokens", field="prompt", value=0, limit=1)
    if ids.size > limits.MAX_PROMPT_TOKENS:
        message = f"the prompt has {ids.size} tokens, at most {limits.MAX_PROMPT_TOKENS} can be sent"
        raise PromptTooLong(message, field="prompt", value=ids.size, limit=limits.MAX_PROMPT_TOKENS)
    if int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID:
        index = int(((ids < 0) | (ids > MAX_TOKEN_ID)).argmax())
        raise _out_of_range(index, int(ids[index]))
    return ids.astype("<i4", copy=False).tobytes()


def _integers(prompt: object) -> Ids:
    """A one-dimensional integer array, a view where one is possible."""
    import numpy as np

    if isinstance(prompt, (bytes, bytearray)) or (isinstance(prompt, memoryview) and prompt.itemsize == 1):
        return np.frombuffer(_whole_tokens(memoryview(prompt)), dtype="<i4")
    if isinstance(prompt, Sequence) and not isinstance(prompt, (memoryview, array)):
        return _from_sequence(prompt)
    try:
        ids = np.asarray(prompt)
    except (BufferError, OverflowError, TypeError, ValueError) as error:
        message = f"the prompt is no array of integers: {error}"
        raise InvalidRequest(message, field="prompt", value=type(prompt).__name__) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        message = f"a prompt is one row of integers, got shape {ids.shape} of {ids.dtype}"
        raise InvalidRequest(message, field="prompt", value=f"{ids.shape} {ids.dtype}")
    return ids


def _whole_tokens(data: memoryview) -> memoryview:
    if data.nbytes % TOKEN_BYTES:
        message = f"packed token ids take {TOKEN_BYTES} bytes each, got {data.nbytes} bytes"
        raise InvalidRequest(message, field="prompt", value=data.nbytes, limit=TOKEN_BYTES)
    return data if data.c_contiguous else memoryview(data.tobytes())  # a slice with a step, for instance


def _from_sequence(prompt: Sequence[Any]) -> Ids:
    """Through `array`, which is three times faster than numpy on a list of Python integers."""
    import numpy as np

    try:
        return np.frombuffer(array("i", prompt), dtype=np.intc)
    except (OverflowError, TypeError):
        raise _first_bad(prompt) from None


def _first_bad(prompt: Sequence[object]) -> InvalidRequest:
    """Why `array` refused: only now is a slow walk worth its time."""
    for index, token in enumerate(prompt):
        if not hasattr(token, "__index__"):
            message = f"token {index} is {token!r}, not an integer"
            return InvalidRequest(message, field="prompt", index=index, value=repr(token))
        value = int(token.__index__())
        if not 0 <= value <= MAX_TOKEN_ID:
            return _out_of_range(index, value)
    return InvalidRequest("the prompt is no sequence of integers", field="prompt", value=type(prompt).__name__)


def _out_of_range(index: int, value: int) -> TokenOutOfRange:
    message = f"token {index} is {value}, ids lie in 0..{MAX_TOKEN_ID}"
    return TokenOutOfRange(message, field="prompt", index=index, value=value, limit=MAX_TOKEN_ID)
