"""Numbers with units."""

from __future__ import annotations

import pytest

from penstock.planning.models.units import (
    byte_count,
    bytes_per_second,
    seconds,
    show_bytes,
    show_seconds,
)


def test_units():
    assert seconds("90") == seconds("90s") == seconds(90) == seconds("1.5min") == 90
    assert seconds("3h") == 10_800
    assert seconds("125y") == 125 * 365.25 * 86_400
    assert byte_count("4.3TiB") == 4.3 * 2**40
    assert byte_count("105 GB") == 105e9
    assert bytes_per_second("6GB/s") == bytes_per_second("6 GB") == 6e9


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (seconds, "60GB", "but a size"),
        (byte_count, "3h", "but a time"),
        (byte_count, "3gb", "is written 'GB'"),
        (byte_count, "6GB/s", "is a rate"),
        (seconds, "-5", "0 or more"),
        (seconds, "inf", "write a number"),
        (seconds, float("inf"), "finite"),
        (seconds, "", "write a number"),
        (seconds, True, "is not a time"),
        (seconds, "1e400", "finite"),
    ],
)
def test_units_that_do_not_fit_are_named(parse, text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_numbers_for_people():
    assert show_seconds(412) == "6.87 min"
    assert show_seconds(90) == "90 s"
    assert show_seconds(1e5) == "27.8 h"
    assert show_seconds(float("inf")) == "never"
    assert show_bytes(1.636e12) == "1.64 TB"
