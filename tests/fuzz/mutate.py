"""Seeded ways to damage a file: raw bytes, and the insides of its format with the checksums made right again."""

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable

from wbmm.io.digest import DIGEST_KEY
from wbmm.io.reader import METADATA_KEY

__all__ = [
    *("CARD_JUNK", "HOSTILE_ARGS", "ODD_VALUES", "flip_bit", "junk_card", "mutate_bytes", "mutate_header"),
    *("mutate_json", "mutate_zip"),
]

EXTREMES = [0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1]


ODD_VALUES = [
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**63,
        -(2**63),
        10**30,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "../../etc/passwd",
    ),
    *("\x1b]0;pwned\x07", "\u202e", "a" * 5000, "__import__('os')", [], {}, [[[]]], {"a": {}}, [0] * 50),
]


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """One bit is another."""
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def flip(data: bytearray, dice: random.Random) -> None:
    for _ in range(dice.choice((1, 1, 1, 2, 8, 64))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def cut(data: bytearray, dice: random.Random) -> None:
    del data[dice.randrange(len(data)) :]


def zero(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    end = min(len(data), start + dice.choice((1, 8, 64, 4096)))
    data[start:end] = bytes(end - start)


def overwrite(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    end = min(len(data), start + dice.choice((1, 4, 16, 256)))
    data[start:end] = dice.randbytes(end - start)


def insert(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    data[start:start] = dice.randbytes(dice.choice((1, 4, 64)))


def remove(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    del data[start : start + dice.choice((1, 4, 64))]


def repeat(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    data[start:start] = data[start : start + dice.choice((4, 64, 1024))]


def number(data: bytearray, dice: random.Random) -> None:
    """An extreme whole number where there may be a length or an offset."""
    if len(data) >= 8:
        start = dice.randrange(len(data) - 7)
        code = dice.choice(("<I", "<Q", ">I"))
        data[start : start + struct.calcsize(code)] = struct.pack(code, dice.choice(EXTREMES))


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [
    *(flip, flip, flip),
    *(cut, zero, overwrite, insert, remove, repeat, number),
]


def mutate_bytes(data: bytes, dice: random.Random) -> bytes:
    """`data`, damaged anywhere; half of the time near its beginning or end, where the structure is."""
    changed = bytearray(data)
    if dice.random() < 0.5 and len(changed) > 8192:
        window = slice(0, 4096) if dice.random() < 0.5 else slice(len(changed) - 4096, len(changed))
        part = changed[window]
        dice.choice(MUTATIONS)(part, dice)
        changed[window] = part
    else:
        dice.choice(MUTATIONS)(changed, dice)
    return bytes(changed)


def _places(value: object, path: tuple = ()) -> list[tuple]:
    """Every place inside nested dictionaries and lists."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, child in children:
        found += _places(child, (*path, key))
    return found


def mutate_json(text: str, rng: random.Random) -> str:
    """One value of a JSON document is another, is gone, or has the value of another place."""
    document = json.loads(text)
    places = _places(document)
    *parents, last = rng.choice(places)
    parent = document
    for key in parents:
        parent = parent[key]
    kind = rng.randrange(4)
    if kind == 0:
        del parent[last]
    elif kind == 1:
        other = document
        for key in rng.choice(places):
            other = other[key]
        parent[last] = json.loads(json.dumps(other))
    elif kind == 2 and isinstance(parent, dict):
        parent[str(rng.choice(ODD_VALUES))] = parent.pop(last)
    else:
        parent[last] = rng.choice(ODD_VALUES)
    return json.dumps(document)


def mutate_zip(data: bytes, dice: random.Random, small: int = 1 << 20) -> bytes:
    """One record of a zip file damaged, or renamed, dropped or emptied, and all its checksums right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name for name in archive.namelist() if not name.endswith("sha256")]
        records = [(name, archive.read(name)) for name in names]
    names = [name for name, content in records if 0 < len(content) < small]
    chosen = next((n for n in names if n.endswith(".pkl")), None) if dice.random() < 0.7 else None
    chosen = chosen or dice.choice(names)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records:
            if name == chosen:
                action = dice.random()
                if action < 0.05:
                    continue
                if action < 0.1:
                    name = dice.choice(["", "../", "model/../"]) + name + dice.choice(["x", ".pt", "/x"])
                elif action < 0.15:
                    content = b""
                elif name.endswith(".json"):
                    content = mutate_json(content.decode(), dice).encode()
                else:
                    content = mutate_bytes(content, dice)
            archive.writestr(name, content)
    return buffer.getvalue()


def mutate_header(data: bytes, dice: random.Random) -> bytes:
    """The JSON at the start of a safetensors file, changed in one place, with its length right and no digest."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.get("__metadata__", {}).pop(DIGEST_KEY, None)
    key = dice.choice([name for name in header if name != "__metadata__"])
    entry = header[key]
    action = dice.randrange(6)
    if action == 0:
        entry["dtype"] = dice.choice(["F64", "F8_E4M3", "I64", "BOOL", "C64", "nonsense", 3])
    elif action == 1:
        entry["shape"] = dice.choice([[], [0], [2**62], [2**32, 2**32], [-1], "x", [1] * 100])
    elif action == 2:
        entry["data_offsets"] = dice.choice([[0, 0], [0, 2**62], [8, 0], [-1, 4], "x", [0]])
    elif action == 3:
        header[dice.choice(["", "\x1b[31m", "a" * 10_000, "модель"])] = header.pop(key)
    elif action == 4:
        del header[key]
    else:
        header["__metadata__"] = dice.choice([{}, {METADATA_KEY: "{"}, {METADATA_KEY: "[]"}, {METADATA_KEY: "null"}])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


# Values that a description may hold instead of what belongs there.
CARD_JUNK = [
    *(None, True, 0, -1, 1, 10**6, 10**18, 0.0, -0.5, 1e308, "", "x", "\x1b]0;x\x07", "a" * 100_000),
    *([], [0], [1, 2, 3, 4], [[[]]], ["x"] * 3, [None], {}, {"a": {}}, [3, 10**9, 10**9], ["\u202e", "\n"]),
]
HOSTILE_ARGS = [
    {"pretrained": True},
    {"checkpoint_path": "/etc/hostname"},
    {"pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/x"}},
    {"pretrained_cfg": {"hf_hub_id": "someone/something", "url": "http://127.0.0.1:9/x"}},
    {"file": "/etc/hostname"},
    {"cache_dir": "/tmp/x"},
    {"dims": [8 * 10**6] * 4},
    {"dims": [8] * 4, "pattern": ["(WD)x999999999"] * 4},
    {"window_size": 10**6},
    {"features_only": True},
    {"scriptable": True},
    {"depths": [10**9] * 4},
]


def junk_card(text: str, dice: random.Random) -> str:
    """A description with one or two of its values replaced."""
    card = json.loads(text)
    if dice.random() < 0.3:
        card["args"] = {**card.get("args", {}), **dice.choice(HOSTILE_ARGS)}
        return json.dumps(card)
    for _ in range(dice.choice((1, 1, 2))):
        card[dice.choice(list(card))] = dice.choice(CARD_JUNK)
    return json.dumps(card)
