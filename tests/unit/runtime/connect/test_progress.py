"""What a report of progress says about event time."""

from __future__ import annotations

import pytest

from ckpt_runtime.connect.queries import _event_time

END_OF_DATA = (1 << 63) - 1


@pytest.mark.parametrize(
    ("watermarks", "reported"),
    [
        ([], {}),
        ([END_OF_DATA], {}),
        ([END_OF_DATA, 1_700_000_000_123, 1_700_000_000_122], {"watermark": "2023-11-14T22:13:20.122Z"}),
        ([-5], {"watermark": "1970-01-01T00:00:00.000Z"}),
    ],
)
def test_progress_has_the_least_watermark_that_is_not_the_end_of_data(
    watermarks: list[int], reported: dict[str, str]
) -> None:
    assert _event_time(watermarks) == reported
