import pytest

from plait.platform.cli.values import format_size, parse_float, parse_size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1024", 1024),
        ("7b", 7),
        ("1k", 1024),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2GiB", 2 << 30),
        ("2gb", 2 * 10**9),
        ("1.5G", 3 << 29),
        (" 3 MiB ", 3 << 20),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "2 GiBs", "-1", "1e3", "2,5GiB", "0x10", "2 X"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="a size such as"):
        parse_size(text)


@pytest.mark.parametrize("num_bytes", [0, 1, 1023, 1024, 3 << 19, 33554432, 5 << 40])
def test_a_formatted_size_reads_back(num_bytes):
    assert parse_size(format_size(num_bytes)) == num_bytes


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_numbers_are_finite(text):
    with pytest.raises(ValueError, match="finite"):
        parse_float(text)
