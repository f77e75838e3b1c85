"""Text from files: shown by a terminal, never obeyed."""

import pytest

from wbmm.text import first_line, printable, render_table, some


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tench, Tinca tinca", "tench, Tinca tinca"),
        ("Käse 日本 עברית 🐈", "Käse 日本 עברית 🐈"),
        ("\x1b]0;pwned\x07", r"\x1b]0;pwned\x07"),
        ("\x1b[2J\x9b31m", r"\x1b[2J\x9b31m"),
        ("a\nb\r\tc\x00", r"a\nb\r\tc\x00"),
        ("user\u202etxt.exe\u2066", r"user\u202etxt.exe\u2066"),
        ("a\u2028b\u200b\ud800", r"a\u2028b\u200b\ud800"),
        (3, "3"),
        (None, "None"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_long_text_is_cut():
    assert printable("a" * 10**6) == "a" * 197 + "..."
    assert printable("a" * 30, limit=10) == "aaaaaaa..."
    assert printable("a" * 200) == "a" * 200


def test_some_names():
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some(list("abcdefg")) == "a, b, c and 4 more"
    assert some(list("abc"), most=1) == "a and 2 more"
    assert some([]) == ""
    assert some(["\x1b[2J"]) == r"\x1b[2J"


def test_cells_of_a_table():
    assert "\x1b" not in render_table(("name", "n"), [["\x1b[31mred\n", 1]])
    assert r"\x1b[31mred\n" in render_table(("name", "n"), [["\x1b[31mred\n", 1]], markdown=True)


def test_a_table_fits_a_terminal_and_loses_no_word():
    rows = [["a", "short", "a sentence of many words that one line of a terminal does not hold"], ["b", "", "one"]]
    lines = render_table(("what", "chosen", "why"), rows, width=50).splitlines()
    assert max(map(len, lines)) <= 50
    assert " ".join(line[14:] for line in lines[2:]).split() == [*rows[0][2].split(), "one"]
    assert max(map(len, render_table(("what", "chosen", "why"), rows).splitlines())) > 50


def test_the_first_line_of_an_error():
    assert first_line(ValueError("\n two words\nmore")) == "two words"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(OSError("a\x1b[31mb")) == r"a\x1b[31mb"
    assert len(first_line(ValueError("x" * 1000))) == 300
