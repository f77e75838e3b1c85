"""The only place that chooses who computes an operator.

Backends are asked in order, and the first that can run takes the call; the reference comes last and can run everything.
`use_backend` and the environment variable WBMM_BACKEND name one instead. Tracing of every kind sees the reference, but
for `torch.compile` in inference on a CPU: see `compiled.py`.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models import register_notrace_function
from torch import Tensor

from wbmm.ops.backends import Backend, Call
from wbmm.ops.backends.onednn import OneDNN
from wbmm.ops.backends.tiled import Tiled
from wbmm.ops.backends.triton import Triton

from . import compiled, reference
from .kept import Kept
from .obstacles import NO_VALUES, changed_module, obstacle, unusual_tensor, wants_grad
from .tables import Window, expand
from .windows import check_map

__all__ = [
    "BACKENDS",
    "conv2d",
    "gated_ffn",
    "kept_matrix",
    "rehearse",
    "squeeze_excite",
    "use_backend",
    "watch",
    "windowed",
]

log = logging.getLogger(__name__)

BACKENDS: list[Backend] = [Triton(), OneDNN(), Tiled()]
REFERENCE = "reference"
Note = Callable[[str, str, dict[str, str]], None]  # operator, backend, reasons of the others

# Of the process, not of a thread: autograd computes checkpointed blocks again in threads of its own.
_asked: str | None = os.environ.get("WBMM_BACKEND") or None
_rehearsing = False
_said: set[tuple[str, str]] = set()
_watcher: Note | None = None


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Takes one backend for the operators that it has, or raises its reason where it cannot; None chooses as usual.

    Args:
        name: `reference`, or the name of one of `BACKENDS`.
    """
    global _asked
    before, _asked = _asked, name
    try:
        _find(name)
        yield
    finally:
        _asked = before


@contextmanager
def rehearse(name: str) -> Iterator[None]:
    """As `use_backend`, on the meta device too, where nothing is computed: to see what a backend would issue."""
    global _rehearsing
    before, _rehearsing = _rehearsing, True
    try:
        with use_backend(name):
            yield
    finally:
        _rehearsing = before


def _obstacle(*tensors: Tensor) -> str | None:
    why = obstacle(*tensors)
    return None if _rehearsing and why == NO_VALUES else why


@contextmanager
def watch(note: Note) -> Iterator[None]:
    """Calls `note(operator, backend, reasons)` at each choice; the reasons are those of the backends not taken."""
    global _watcher
    before, _watcher = _watcher, note
    try:
        yield
    finally:
        _watcher = before


def _find(name: str | None) -> Backend | None:
    """The backend of a name; None for the reference, or if there is no name."""
    known = {backend.name: backend for backend in BACKENDS}
    if name in (None, REFERENCE):
        return None
    if name not in known:
        raise ValueError(f"backend {name!r}: expected one of {', '.join([*known, REFERENCE])}")
    return known[name]


def _named(operator: str) -> Backend | None:
    """The backend that was asked for by name, if it has the operator."""
    backend = _find(_asked)
    return backend if backend is not None and operator in backend.operators else None


def _refuse(operator: str, why: str) -> None:
    """An error if a backend was asked for that has the operator: this call is not for it."""
    backend = None if _asked is None else _named(operator)
    if backend is not None and why != NO_VALUES:
        raise ValueError(f"backend {backend.name!r} cannot compute {operator}: {why}")


def choose(call: Call) -> Backend | None:
    """Who computes a call; None for the reference."""
    if _asked is None:
        chosen = _first(call)
    else:
        chosen = _named(call.operator)
        why = None if chosen is None else chosen.can_run(call)
        if why is not None:
            _refuse(call.operator, why)
    if _watcher is not None:
        _tell(call, chosen, _watcher)
    return chosen


def _first(call: Call) -> Backend | None:
    """The first backend that can run a call, and that no other is better for."""
    for backend in BACKENDS:
        if call.operator not in backend.operators:
            continue
        why = backend.can_run(call) or backend.better_elsewhere(call)
        if why is None:
            return backend
        if (backend.name, why) not in _said:
            _said.add((backend.name, why))
            log.debug("%s does not compute %s: %s", backend.name, call.operator, why)
    return None


def _tell(call: Call, chosen: Backend | None, note: Note) -> None:
    """Who was chosen, and why the others were not."""
    reasons = {}
    for backend in BACKENDS:
        if backend is not chosen:
            has = call.operator in backend.operators
            why = backend.can_run(call) or backend.better_elsewhere(call) if has else f"it has no {call.operator}"
            reasons[backend.name] = why or "it comes later in the list"
    note(call.operator, REFERENCE if chosen is None else chosen.name, reasons)


def _pick(operator: str, why: str | None, x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Backend | None, bool]:
    """Who computes an operator, None for the reference; and whether with gradients. `why` is an obstacle to all."""
    if why is not None:
        _refuse(operator, why)
        return None, False
    grad = wants_grad(x, *weights)
    return choose(Call(operator, x, weights, grad)), grad


def windowed(
    x: Tensor,
    tables: list[Tensor],
    window: Window,
    bias: Tensor | None = None,
    shortcuts: int = 0,
    padding_mode: str = "zeros",
    index: list[Tensor] | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """As `reference.windowed`; `kept` is where what is made of the tables may stay in inference."""
    why = _obstacle(x, *tables)
    if why is not None:
        _refuse("windowed", why)
        if _asked is None and tables[0].ndim == 2 and kept is not None and compiled.compiler_takes(x, tables[0], kept):
            return compiled.windowed(x, tables, window, bias, shortcuts, padding_mode, kept)
        if torch.compiler.is_exporting() and any(isinstance(side, torch.SymInt) for side in x.shape[-2:]):
            matrix = expand(tables, window, index)
            return reference.opaque_product(x, matrix, list(window), bias, shortcuts, padding_mode)
        return reference.windowed(x, tables, window, bias, shortcuts, padding_mode, index)
    check_map(x, tables[0].shape[0])
    weights = (*tables,) if bias is None else (*tables, bias)
    grad = wants_grad(x, *weights)
    backend = choose(Call("windowed", x, weights, grad, window, len(tables)))
    if backend is not None:
        return backend.windowed(x, tables, window, bias, shortcuts, padding_mode, grad, kept)
    if kept is not None and not grad:
        tables = [kept_matrix(tables, window, index, kept)]
    return reference.windowed(x, tables, window, bias, shortcuts, padding_mode, index)


def kept_matrix(tables: list[Tensor], window: Window, index: list[Tensor] | None, kept: Kept) -> Tensor:
    """`expand`, from what is kept in inference."""
    if tables[0].ndim == 3 or wants_grad(*tables) or _obstacle(*tables) is not None:
        return expand(tables, window, index)
    return kept.get("matrix", tables, lambda: expand(tables, window, index))


def gated_ffn(
    x: Tensor,
    fc1: nn.Module,
    grn: Any,
    fc2: nn.Module,
    gate: Tensor | None = None,
    norm: nn.Module | None = None,
    scale: Tensor | None = None,
    shortcut: Tensor | None = None,
    drop_path: nn.Module | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """As `reference.gated_ffn`; GRN may be its gamma and eps, and `kept` is where packed weights may stay.

    A backend reads the weights of `fc1`, `grn` and `fc2` only if those modules are exactly what was built.
    """
    why = _obstacle(x) or changed_module(
        fc1=(fc1, nn.Linear), grn=(grn, reference.GlobalResponseNorm), fc2=(fc2, nn.Linear)
    )
    weights = ()
    if why is None:
        gamma, beta, eps = (grn[0], None, grn[1]) if type(grn) is tuple else (grn.gamma, grn.beta, grn.eps)
        given = (fc1.weight, fc1.bias, gamma, beta, fc2.weight, fc2.bias, gate, scale, shortcut)
        weights = tuple(weight for weight in given if weight is not None)
        why = unusual_tensor(*weights)
    inference_form = type(grn) is tuple  # which has no norm and no scale
    if (
        why is not None
        and _asked is None
        and inference_form
        and kept is not None
        and compiled.compiler_takes(x, grn[0], kept)
        and changed_module(fc1=(fc1, nn.Linear), fc2=(fc2, nn.Linear)) is None
    ):
        return compiled.gated_ffn(x, gate, shortcut, (fc1.weight, fc1.bias, *grn, fc2.weight, fc2.bias), kept)
    backend, grad = _pick("gated_ffn", why, x, weights)
    if backend is not None:
        return backend.gated_ffn(x, fc1, (gamma, beta, eps), fc2, gate, norm, scale, shortcut, drop_path, grad, kept)
    if type(grn) is tuple:
        grn = partial(reference.grn, gamma=grn[0], beta=None, eps=grn[1])
    return reference.gated_ffn(x, fc1, grn, fc2, gate, norm, scale, shortcut, drop_path)


def squeeze_excite(x: Tensor, fc1: nn.Module, fc2: nn.Module, kept: Kept | None = None) -> Tensor:
    """As `reference.squeeze_excite`; a backend reads the weights only if both modules are exactly what was built."""
    why = _obstacle(x) or changed_module(fc1=(fc1, nn.Linear), fc2=(fc2, nn.Linear))
    weights = ()
    if why is None:
        given = (fc1.weight, fc1.bias, fc2.weight, fc2.bias)
        weights = tuple(weight for weight in given if weight is not None)
        why = unusual_tensor(*weights)
    backend, grad = _pick("squeeze_excite", why, x, weights)
    if backend is not None:
        return backend.squeeze_excite(x, fc1, fc2, grad, kept)
    return reference.squeeze_excite(x, fc1, fc2)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kept: Kept | None = None,
) -> Tensor:
    """`F.conv2d`; `kept` is where the packed weight may stay in inference."""
    weights = (weight,) if bias is None else (weight, bias)
    backend, grad = _pick("conv2d", _obstacle(x, *weights), x, weights)
    if backend is not None:
        return backend.conv2d(x, weight, bias, stride, padding, dilation, groups, grad, kept)
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


# Leaves for fx: a traced model chooses as an eager one does.
for _operator in (windowed, gated_ffn, squeeze_excite, conv2d):
    register_notrace_function(_operator)
