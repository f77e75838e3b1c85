"""Profiles: what is written is read again, wrong files are refused in one line, and the right one holds."""

import dataclasses
import json
import logging

import pytest
import torch

from wbmm.machine import processor
from wbmm.ops import profile
from wbmm.ops.profile import Profile, Thresholds


@pytest.fixture(autouse=True)
def _nothing_read(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WBMM_PROFILE", raising=False)
    profile._read.cache_clear()
    yield
    profile._read.cache_clear()


def tuned(name="a processor", least_side=9):
    return Profile(name, "today", Thresholds(least_side=least_side), Thresholds(least_side=least_side + 1))


def in_default_place(text):
    place = profile.default_place()
    place.parent.mkdir(parents=True)
    place.write_text(text)


def test_what_is_written_is_read_again():
    assert profile.parse(profile.to_text(tuned())) == tuned()
    assert profile.parse(profile.to_text(Profile())) == Profile()


def test_without_a_file_the_defaults_hold():
    assert profile.current() == Profile()
    assert "AMD EPYC" in profile.current().processor


def test_each_type_has_its_own():
    with profile.use_profile(tuned()):
        assert profile.thresholds(torch.float32).least_side == 9
        assert profile.thresholds(torch.bfloat16).least_side == 10
        assert profile.thresholds(torch.float64).least_side == 9
    assert profile.thresholds(torch.float32) == Thresholds()


def test_thresholds_that_are_not_named_keep_their_defaults():
    found = profile.parse('{"processor": "p", "measured": "m", "float32": {"block_rows": 10}}')
    assert found == Profile("p", "m", Thresholds(block_rows=10))


def test_the_variable_names_a_file(tmp_path, monkeypatch):
    path = tmp_path / "other.json"
    path.write_text(profile.to_text(tuned()))
    monkeypatch.setenv("WBMM_PROFILE", str(path))
    assert profile.current() == tuned(), "whatever processor it was measured on"


def test_a_wrong_file_that_was_named_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("WBMM_PROFILE", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        profile.current()


def test_the_default_place_is_read_if_it_is_of_this_processor():
    in_default_place(profile.to_text(tuned(processor())))
    assert profile.current() == tuned(processor())


@pytest.mark.parametrize(
    ("text", "said"), [(profile.to_text(tuned("another")), "measured on another"), ("{", "not JSON")]
)
def test_the_default_place_is_passed_over_with_a_word(text, said, caplog):
    in_default_place(text)
    with caplog.at_level(logging.WARNING, logger="wbmm.ops.profile"):
        assert profile.current() == Profile()
    assert said in caplog.text


HEAD = '"processor": "p", "measured": "m"'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("[" * 50_000, "not JSON"),
        ("\udcff".encode("utf-8", "surrogateescape"), "not JSON"),
        ("[1]", "the file: expected an object, not list"),
        ("{}", "processor None: expected a text"),
        ('{"processor": "p", "measured": 3}', "measured 3: expected a text"),
        (f'{{{HEAD}, "float64": {{}}}}', "the file has 'float64': expected some of processor"),
        (f'{{{HEAD}, "float32": 7}}', "float32: expected an object, not int"),
        (f'{{{HEAD}, "float32": {{"least": 7}}}}', "float32 has 'least': expected some of least_side"),
        (f'{{{HEAD}, "float32": {{"least_side": 0}}}}', "least_side 0: expected a whole number from 1 to"),
        (f'{{{HEAD}, "float32": {{"least_side": 7.5}}}}', r"least_side 7\.5: expected a whole number"),
        (f'{{{HEAD}, "float32": {{"least_side": true}}}}', "least_side True: expected a whole number"),
        (f'{{{HEAD}, "float32": {{"least_width": 14}}}}', "least_width 14: expected an odd number"),
        (f'{{{HEAD}, "bfloat16": {{"block_bytes": 1e999}}}}', "block_bytes inf: expected a whole number"),
        (" " * 70_000, "larger than 65536 bytes"),
    ],
)
def test_wrong_files_are_refused_in_one_line(text, why, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=why) as caught:
        profile.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_threshold_has_bounds_and_is_in_the_file():
    names = [each.name for each in dataclasses.fields(Thresholds)]
    assert all("bounds" in each.metadata for each in dataclasses.fields(Thresholds))
    assert list(json.loads(profile.to_text(Profile()))["float32"]) == names
