"""Whether a .pt2 file holds a plain program and nothing else.

`torch.export.load` unpickles parts of a file, evaluates its expressions with sympy's `eval`, finds operators by any
dotted name under `torch`, and loads compiled libraries. So a file is read here first, and only what `wbmm export`
writes is let through: raw tensors, operators of ATen and our own, and expressions over sizes.
"""

import io
import json
import re
import zipfile
from pathlib import Path

from wbmm.models.state import CheckpointError

__all__ = ["check_archive"]

_RECORDS = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|models/model\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt|extra/wbmm\.json"
)
_NAME = re.compile(r"[\w.+-]*")
_TARGET = re.compile(
    r"torch\.ops\.(aten|wbmm)\.(?!from_file)_?[a-z0-9]\w*\.[A-Za-z]\w*"
    r"|torch\.sym_(max|min|int|float|not|ite)|_operator\.(add|sub|mul|floordiv|mod|neg|eq|ne|lt|le|gt|ge|getitem|and_|or_)"
)
_EXPRESSION = re.compile(r"[\w\s()',=*/+<>-]*")
_GUARD = re.compile(r"[\w\s()\[\]'.,%=!*/+<>-]*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_SYMBOL = re.compile(r"[suz]\d+")
_WORDS = {
    *("Symbol", "Integer", "Add", "Mul", "Pow", "Mod", "Max", "Min", "FloorDiv", "CeilDiv", "CleanDiv", "PythonMod"),
    *("Eq", "Ne", "Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan"),
    *("Not", "And", "Or", "true", "false", "True", "False", "positive", "nonnegative", "integer"),
}
_GUARD_WORDS = {"L", "images", "size", "not", "and", "or", "max", "min"}
_TREE_TYPES = {None, "builtins.tuple", "builtins.list", "builtins.dict"}


def check_archive(path: str | Path) -> io.BytesIO:
    """The contents of a .pt2 file, or a `CheckpointError` if there is anything in it that could run."""
    from torch.export.pt2_archive import PT2ArchiveReader

    contents = io.BytesIO(Path(path).read_bytes())
    try:
        roots = {name.partition("/")[0] for name in zipfile.ZipFile(contents).namelist() if "/" in name}
        plain = len(roots) == 1 and all("/" in name for name in zipfile.ZipFile(contents).namelist())
        contents.seek(0)
        reader = PT2ArchiveReader(contents)
        records = reader.get_file_names()
        program = json.loads(reader.read_string("models/model.json"))
        payloads = [json.loads(reader.read_string(name)) for name in records if name.endswith("_config.json")]
        samples = reader.read_bytes("data/sample_inputs/model.pt")
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: not a readable torch.export file, perhaps truncated ({reason[:200]})") from None
    reason = _what_could_run(records, plain, payloads, samples, program)
    if reason is not None:
        raise CheckpointError(
            f"{path}: refused, since it could run code when loaded ({reason}); take one of `wbmm export`"
        )
    contents.seek(0)
    return contents


def _what_could_run(
    records: list[str], plain: bool, payloads: list[dict], samples: bytes, program: object
) -> str | None:
    strange = [name for name in records if not _RECORDS.fullmatch(name)]
    if strange:
        return f"the part {strange[0]!r}"
    if not plain:
        return "parts outside the archive"
    if samples or any(map(_has_pickle, payloads)):
        return "a pickle"
    return _find_strange(program)


def _has_pickle(payload: dict) -> bool:
    return any(
        entry["use_pickle"] is not False or not re.fullmatch(r"(weight|tensor)_\d+", entry["path_name"])
        for entry in payload["config"].values()
    )


def _find_strange(value: object, key: str = "") -> str | None:
    """The first string of a program that is not of a known kind."""
    if isinstance(value, str):
        return None if _is_plain(value, key) else f"{key} {value[:80]!r}"
    children = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = [(key, item) for item in value]
    for name, child in children:
        found = _find_strange(child, name) if _NAME.fullmatch(name) else f"the key {name[:80]!r}"
        if found is not None:
            return found
    return None


def _is_plain(text: str, key: str) -> bool:
    if key == "target":
        return _TARGET.fullmatch(text) is not None and "__" not in text
    if key == "expr_str":
        return _EXPRESSION.fullmatch(text) is not None and _words_in(text, _WORDS)
    if key == "guards_code":
        return _GUARD.fullmatch(text) is not None and _words_in(text, _GUARD_WORDS)
    if key in ("in_spec", "out_spec"):
        return _is_plain_tree(json.loads(text))
    return _NAME.fullmatch(text) is not None


def _words_in(text: str, known: set[str]) -> bool:
    return all(word in known or _SYMBOL.fullmatch(word) for word in _WORD.findall(text))


def _is_plain_tree(spec: object) -> bool:
    """Whether a description of nested inputs is of tuples, lists and dicts alone."""
    if isinstance(spec, list):
        return all(isinstance(item, int) or _is_plain_tree(item) for item in spec)
    return (
        isinstance(spec, dict)
        and spec.get("type") in _TREE_TYPES
        and spec.get("context") in (None, "null", "[]")
        and all(map(_is_plain_tree, spec.get("children_spec", ())))
    )
