"""What an operator says about a stage daemon: wrong numbers are refused by name before anything starts."""

from __future__ import annotations

import pytest

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_stage.runtime.settings import StageSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool_blocks", 0),
        ("pool_blocks", limits.MAX_POOL_BLOCKS + 1),
        ("host_pool_blocks", -1),
        ("host_pool_blocks", 10**20),
        ("state_slots", 0),
        ("state_slots", limits.MAX_STATE_SLOTS + 1),
        ("wave_tokens", 1),
        ("wave_tokens", limits.MAX_WAVE_TOKENS + 1),
        ("threads", 0),
        ("threads", 100_000),
        ("lanes", limits.MAX_LANES + 1),
    ],
)
def test_settings_name_field_value_and_limit_when_a_number_is_out_of_range(field: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StageSettings(stage=0, stages=1, model="emulated:layers=8", **{field: value})  # type: ignore[arg-type]
    assert caught.value.fields.keys() == {"field", "value", "limit"}
    assert (caught.value.fields["field"], caught.value.fields["value"]) == (field, str(value))
