"""The configuration text inside a runner's checkpoint, read and changed without running it."""

import ast

__all__ = ["read_model", "set_backbone_form"]

MOST_TEXT = 1 << 20  # characters; MMDetection's longest configuration has 20,000


def read_model(text: str) -> dict | None:
    """The `model` dict of a dumped configuration as plain data; None if it is not there or is more than literals."""
    node = _model_node(text)
    if node is None:
        return None
    try:
        value = _literal(node)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def set_backbone_form(text: str, form: str) -> str:
    """The text with `form` set in the model's backbone; as it is if there is no backbone written as `dict(...)`."""
    backbone = _argument(_model_node(text), "backbone")
    if not _is_dict_call(backbone):
        return text
    old = _argument(backbone, "form")
    if old is not None:
        return _splice(text, (old.lineno, old.col_offset), (old.end_lineno, old.end_col_offset), repr(form))
    after_name = (backbone.func.end_lineno, backbone.func.end_col_offset + 1)
    return _splice(text, after_name, after_name, f"form={form!r}, ")


def _model_node(text: str) -> ast.expr | None:
    if len(text) > MOST_TEXT:
        return None
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last: too many brackets inside each other
        return None
    for statement in statements:
        if isinstance(statement, ast.Assign) and [getattr(t, "id", None) for t in statement.targets] == ["model"]:
            return statement.value
    return None


def _argument(call: ast.expr | None, name: str) -> ast.expr | None:
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return next((keyword.value for keyword in keywords if keyword.arg == name), None)


def _is_dict_call(node: ast.expr | None) -> bool:
    """Whether an expression is `dict(name=..., ...)`."""
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", None) == "dict"
        and not node.args
        and all(keyword.arg is not None for keyword in node.keywords)
    )


def _literal(node: ast.expr) -> object:
    """The value of an expression of literals and `dict(name=...)`; `ValueError` for anything else."""
    if isinstance(node, ast.Call):
        if not _is_dict_call(node):
            raise ValueError("more than literals")
        return {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.List | ast.Tuple):
        values = [_literal(item) for item in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _splice(text: str, start: tuple[int, int], end: tuple[int, int], new: str) -> str:
    """Replaces what stands between two positions; ast counts lines from 1 and columns in UTF-8 bytes."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    offset = [sum(len(line) for line in lines[: line_number - 1]) + column for line_number, column in (start, end)]
    data = b"".join(lines)
    return (data[: offset[0]] + new.encode() + data[offset[1] :]).decode()
