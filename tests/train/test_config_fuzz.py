"""Every field of the configuration with values of a wrong type, sign, range and size: refused in one line, or valid."""

import dataclasses
import math
import random
import types
import typing
from collections import Counter

import pytest
import yaml

from wbmm.fields import Choice, Items, Range
from wbmm.train.config import TrainConfig, config_from_dict, load_config, to_dict

SEED = 0
WHOLE = (0, 1, -1, 2, 3, 10**6, 10**9, 10**12, -(10**12), 2**63, -(2**63), 2**64, 10**400)
NUMBERS = (0.0, 0.5, 1.0, -0.5, 1.5, 1e-12, 5e-324, 1e12, 1e308, -1e308, math.nan, math.inf, -math.inf)
WORDS = ("", " ", "x", "1", "-1", "1e3", "1e999", "nan", "inf", "\u0661", "1_000", "none", "auto", "true", "a.b", "a/b")
STRANGE = ("\0", "a\nb", "\x1b[31m", "\u2028", "\ud800", "\xe9" * 300, "\U0001f986", "a" * 10_000, "..", "/", "{}")
PATHS = ("~nosuchuser/x", "/dev/null/x", "a" * 300)
LISTS = (
    [],
    [None],
    [0.9],
    [0.5, 0.5],
    [1, 2, 3],
    [-1.0, 2.0],
    [math.nan, 1.0],
    ["x"],
    [["x"]],
    [0.1] * 1100,
    [[[[[[]]]]]],
)
KEYS = ({}, {1: 2}, {None: 1}, {"": 1}, {"a b": 1}, {"foo": 1}, {"foo": {"foo": {}}}, {"pretrained": True})
ITEMS = ({"checkpoint_path": "x"}, {"x": 10**30}, {"x": math.nan}, {"x": "\0"}, {"x": [[[[[[1]]]]]]}, {"x": [1] * 1100})
VALUES = (None, True, False, *WHOLE, *NUMBERS, *WORDS, *STRANGE, *PATHS, *LISTS, *KEYS, *ITEMS, b"bytes", {"a", "b"})

BROKEN = ("{", "[1,", "a: b: c", "@", "%", "`", "*a", "{[1]: 2}", "<<: 1", "{<<: [1]}", "? x", "- - -", "{a: 1, a: 2}")
TAGS = (
    "!!bool x",
    "!!int ''",
    "!!int x",
    "!!timestamp x",
    "!!float x",
    "!!binary x",
    "!x y",
    "!!python/name:os.system x",
)
LARGE = ("[" * 200, "{a: " * 200, "9" * 5000, "0x" + "f" * 6000, "&a [*a]", "&a {x: *a}", "2026-99-99", "1:99:99")


def leaves(cls: type = TrainConfig, prefix: str = "") -> dict[str, tuple]:
    """The fields that hold a value: key to (type, rule)."""
    found = {}
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            found |= leaves(hint, f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = (hint, item.metadata.get("rule"))
    return found


LEAVES = leaves()


def values_of(key: str, draw: random.Random, extra: int) -> list:
    """The values to try on a field: those of every field, its ends and just beyond them, and garbage."""
    rule, values = LEAVES[key][1], list(VALUES)
    each = rule.each if isinstance(rule, Items) else rule
    if isinstance(each, Range):
        ends = [
            each.low,
            each.low - 1,
            each.low / 2,
            edge(each.low),
            each.high,
            each.high + 1,
            each.high * 2,
            edge(each.high),
        ]
        ends += [int(end) for end in ends]
        ends += [draw.uniform(-3, 3) * 10 ** draw.randint(-9, 12) for _ in range(extra)]
        values += [[end] * rule.least for end in ends] if isinstance(rule, Items) else ends
    if isinstance(each, Choice):
        values += [
            *each.values,
            *(f"{value} " for value in each.values),
            *(f"{value}".upper() for value in each.values),
        ]
    return values + [garbage(draw, 3) for _ in range(extra)]


def edge(value: float) -> float:
    return math.nextafter(value, -math.inf if value <= 0 else math.inf)


def garbage(draw: random.Random, depth: int):
    kinds = [
        lambda: draw.getrandbits(draw.choice([8, 40, 70, 300])) * draw.choice([1, -1]),
        lambda: draw.uniform(-1, 1) * 10 ** draw.randint(-300, 300),
        lambda: "".join(chr(draw.randrange(0x3000)) for _ in range(draw.randrange(20))),
        lambda: draw.choice([None, True, False]),
        lambda: [garbage(draw, depth - 1) for _ in range(draw.randrange(4))],
        lambda: {garbage(draw, 0): garbage(draw, depth - 1) for _ in range(draw.randrange(3))},
    ]
    return draw.choice(kinds if depth else kinds[:4])()


def nested(key: str, value) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def written(value) -> str:
    """A value as it stands in an override."""
    style = '"' if isinstance(value, str) else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def verdict(load, key: str) -> TrainConfig | str:
    """The configuration, or the error after checking that it is one line that names the key."""
    try:
        return load()
    except ValueError as error:
        text = str(error)
        assert len(text.splitlines()) == 1, f"{key}: {text!r}"
        assert len(text) < 1000, f"{key}: {text!r}"
        assert text.isprintable(), f"{key}: {text!r}"
        assert key in text, f"{key}: {text!r}"
        return text


def assert_within(config: TrainConfig, key: str) -> None:
    """What was accepted is of its type and in its range, and is still accepted when it is read again."""
    value = config
    for part in key.split("."):
        value = getattr(value, part)
    hint, rule = LEAVES[key]
    if value is None:
        assert types.NoneType in typing.get_args(hint), key
    else:
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not types.NoneType]
        kind = list if typing.get_origin(hint) is list else kinds[0]
        assert type(value) is kind, (key, value)
        for number in value if isinstance(value, list) else [value]:
            assert not isinstance(number, float) or math.isfinite(number), (key, value)
        each = rule.each if isinstance(rule, Items) else rule
        if isinstance(each, Range):
            assert all(each.low <= number <= each.high for number in (value if kind is list else [value])), (key, value)
        assert rule is None or rule.problem(value) is None, (key, value)
    assert config_from_dict(to_dict(config)) == config, key


def fuzz(seed: int = SEED, extra: int = 5, keys: typing.Iterable[str] = LEAVES) -> Counter:
    """Tries every field; raises AssertionError at a value that is neither refused in one line nor valid.

    Returns:
        How many were tried, refused and accepted.
    """
    draw, counts = random.Random(seed), Counter(fields=len(LEAVES))
    for key in keys:
        for value in [*values_of(key, draw, extra), 10**5000]:  # which Python does not print
            result = verdict(lambda key=key, value=value: config_from_dict(nested(key, value)), key)
            if not isinstance(result, str):
                assert_within(result, key)
            counts.update(["tried", "refused" if isinstance(result, str) else "accepted"])
    return counts


@pytest.mark.parametrize("section", sorted({key.rpartition(".")[0] for key in LEAVES}))
def test_every_field_refuses_in_one_line_or_is_in_its_range(section):
    counts = fuzz(keys=[key for key in LEAVES if key.rpartition(".")[0] == section])
    assert counts["refused"] > counts["accepted"] > 0
    assert counts["refused"] + counts["accepted"] == counts["tried"]


@pytest.mark.heavy
def test_many_more_values():
    assert fuzz(seed=1, extra=300)["tried"] > 20_000


def test_no_field_lacks_a_rule():
    assert [key for key, (hint, rule) in LEAVES.items() if rule is None and hint not in (bool, bool | None)] == []


def test_the_defaults_obey_the_rules():
    for key in LEAVES:
        assert_within(TrainConfig(), key)


def test_a_file_and_an_override_get_the_same_verdict(tmp_path):
    """The whole way, with the model and the paths."""
    draw, path, empty = random.Random(SEED), tmp_path / "a.yaml", tmp_path / "empty" / "a.yaml"
    empty.parent.mkdir()
    empty.write_text("")
    for key in LEAVES:
        short = [value for value in values_of(key, draw, 5) if len(repr(value)) < 500]
        for value in draw.sample(short, 6):
            path.write_text(yaml.safe_dump(nested(key, value)))
            in_file = verdict(lambda: load_config(path), key)
            override = f"{key}={written(value)}"
            given = verdict(lambda override=override: load_config(empty, [override]), key)
            if isinstance(given, str):
                assert in_file == given.replace(str(empty), str(path)), override
            else:
                assert in_file == given, override
                assert_within(given, key)


@pytest.mark.parametrize("text", [*BROKEN, *TAGS, *LARGE], ids=lambda text: text[:20])
def test_yaml_that_is_none(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text("")
    for key in ("seed", "optim.lr", "model.args", "data.args", "out", "model.freeze"):
        result = verdict(lambda key=key: load_config(path, [f"{key}={text}"]), key)
        assert isinstance(result, str) or key == "out", (key, text)
    path.write_text(f"model:\n  args: {text}\n")
    with pytest.raises(ValueError) as error:
        load_config(path)
    assert len(str(error.value).splitlines()) == 1


def test_files_that_are_no_configuration(tmp_path):
    path = tmp_path / "a.yaml"
    for content in (b"\xff\xfe", b"\0", b"[1, 2]", b"text", b"base: 5", b"base: [a.yaml]", b'base: "\\0"', b"1: 2"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)) as error:
            load_config(path)
        assert len(str(error.value).splitlines()) == 1
