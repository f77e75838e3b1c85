"""Thousands of damaged files through every entry point; a finding is anything but a clean refusal or the same result.

    python -m tests.fuzz.fuzz --count 3000 --seed 1

Each file is opened in a process of its own, forked from one that has everything imported, with the network cut off and
bounds on time and memory. Findings: a signal, a hang, too much memory, a traceback or more than a line of error, a
connection that was tried, and a damaged file that gives another result without a word.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads do not survive a fork

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save

import wbmm
from tests.fuzz.mutate import junk_card, mutate_bytes, mutate_header, mutate_zip
from tests.helpers import randomize
from wbmm import cli
from wbmm.deploy.export import FORMATS
from wbmm.io.digest import DIGEST_KEY, digest
from wbmm.io.files import load_weights, to_pth
from wbmm.io.reader import METADATA_KEY, safe_load
from wbmm.train import checkpoint as runs
from wbmm.train.build import init_weights
from wbmm.train.config import TrainConfig, to_dict

SECONDS = 60
MOST_MEMORY = 2 << 30
MOST_LINES = 14
ARCHITECTURE = {"dims": [8, 16, 32, 64]}
CLASSES = ["a", "b", "c", "d"]


def make():
    torch.manual_seed(0)
    return randomize(timm.create_model("wbmm_a", num_classes=4, **ARCHITECTURE)).eval()


@dataclass
class Format:
    """A kind of file: how a good one is made, what can be done to it, and where it goes.

    Attributes:
        name: for people.
        suffix: of the file.
        data: of a good one.
        doors: what opens it: name -> a function of its path that returns something to compare.
        mutations: name -> (data, dice) -> data.
        checked: mutations after which the checksums are wrong, so that a changed result is a finding.
        beside: further files that belong to it, by suffix.
    """

    name: str
    suffix: str
    data: bytes
    doors: dict[str, Callable[[Path], object]]
    mutations: dict[str, Callable[[bytes, random.Random], bytes]]
    checked: tuple[str, ...] = ("bytes",)
    beside: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Finding:
    format: str
    mutation: str
    door: str
    what: str
    seed: str
    text: str = ""


def command(*argv: str) -> int:
    """A `wbmm` command, as typed; its exit code."""
    return cli.main([str(part) for part in argv])


def _weights(path: Path) -> str:
    return digest(wbmm.load_model(path).state_dict())


def _into_model(path: Path) -> str:
    return digest(load_weights(make(), path).state_dict())


def _init(path: Path) -> str:
    model = make()
    init_weights(model, path)
    return digest(model.state_dict())


def _predict(path: Path) -> str:
    picture = path.parent / "picture.png"
    table = path.parent / f"{path.name}.csv"
    code = command("predict", path, picture, "--csv", table, "--force", "--workers", 0)
    if code:
        raise SystemExit(code)
    return table.read_text()


def _reparam(path: Path) -> str:
    out = path.parent / f"{path.name}.fused.safetensors"
    code = command("reparam", path, out, "--force")
    if code:
        raise SystemExit(code)
    return digest(safe_load(out))


def _resume(path: Path) -> str:
    read = runs.read(path)
    return digest(read["model"]) + json.dumps([read["position"], read["config"]])


def _safe(path: Path) -> str:
    read = safe_load(path)
    found = read.get("state_dict", read) if isinstance(read, dict) else read
    return digest({str(k): v for k, v in found.items() if isinstance(v, torch.Tensor)})


MODEL_DOORS = {"load_model": _weights, "load_weights": _into_model, "init": _init, "wbmm predict": _predict}
MODEL_DOORS["wbmm reparam"] = _reparam


def _card_safetensors(data: bytes, dice: random.Random) -> bytes:
    """Another description, with the digest made right."""
    length = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + length])["__metadata__"][METADATA_KEY]
    tensors = {key: value.contiguous() for key, value in make().state_dict().items()}
    new = junk_card(text, dice)
    return save(tensors, metadata={METADATA_KEY: new, DIGEST_KEY: digest(tensors, new)})


def _run_payload() -> dict:
    """What a checkpoint of a run holds."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    optimizer.step()
    config = TrainConfig()
    config.model.name, config.model.args = "wbmm_a", dict(ARCHITECTURE)
    config.data.size = 64
    position = {"step": 3, "evaluated": True, "skips": 0, "best": 1.0, "metrics": {}, "steps_per_epoch": 10}
    return {
        "model": model.state_dict(),
        "ema": None,
        "optimizer": optimizer.state_dict(),
        "scheduler": {"a": 1},
        "scaler": {},
        "seconds": 1.0,
        "position": position,
        "config": to_dict(config),
        "num_classes": 4,
        "class_names": CLASSES,
    }


def _legacy(contents: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def checkpoint_formats(folder: Path) -> list[Format]:
    """Files that PyTorch and safetensors read."""
    model = make()
    card = wbmm.io.card.card_of(model).replace(class_names=CLASSES)
    wbmm.save_model(model, folder / "good.safetensors", card)
    wbmm.save_model(model, folder / "good.pth", card)
    tensors, pth = (folder / "good.safetensors").read_bytes(), (folder / "good.pth").read_bytes()
    raw, inside = {"bytes": mutate_bytes}, {"bytes": mutate_bytes, "inside": mutate_zip}
    return [
        Format(
            "safetensors",
            ".safetensors",
            tensors,
            MODEL_DOORS,
            {**raw, "header": mutate_header, "card": _card_safetensors},
        ),
        Format("pth of save_model", ".pth", pth, MODEL_DOORS, inside),
        Format("bare state dict", ".pth", to_pth(model.state_dict()), {**MODEL_DOORS, "safe_load": _safe}, inside),
        Format("run", ".pt", to_pth(_run_payload()), {**MODEL_DOORS, "resume": _resume}, inside),
        Format("pth before torch 1.6", ".pth", _legacy(model.state_dict()), MODEL_DOORS, raw, checked=()),
    ]


def mm_formats() -> list[Format]:
    """A checkpoint of mmengine's runner, with its log buffers; none where mmengine is not installed."""
    try:
        from mmengine.logging import HistoryBuffer
    except ImportError:
        return []
    from wbmm.mm.mm_checkpoint import read_mm_checkpoint

    backbone = {f"backbone.{key}": value for key, value in make().state_dict().items() if not key.startswith("head")}
    for i, dim in enumerate(ARCHITECTURE["dims"]):
        backbone |= {f"backbone.norm{i}.weight": torch.ones(dim), f"backbone.norm{i}.bias": torch.zeros(dim)}
    pattern = tuple(make().patterns)
    text = f"model = dict(backbone=dict(type='WBMMBackbone', dims={ARCHITECTURE['dims']}, pattern={pattern}))"
    hub = {"log_scalars": {"train/loss": HistoryBuffer([1.0, 2.0], [1, 1])}, "runtime_info": {"iter": 3}}
    contents = {"meta": {"cfg": text, "epoch": 1}, "state_dict": backbone, "message_hub": hub}

    def read(path: Path) -> str:
        return digest(read_mm_checkpoint(path)["state_dict"])

    def reparam(path: Path) -> str:
        out = path.parent / f"{path.name}.fused.pth"
        code = command("reparam", path, out, "--force")
        if code:
            raise SystemExit(code)
        return digest(safe_load(out)["state_dict"])

    doors = {"mmengine's loader": read, "wbmm reparam": reparam}
    return [Format("mmengine runner", ".pth", to_pth(contents), doors, {"bytes": mutate_bytes, "inside": mutate_zip})]


def exported_formats(folder: Path, only: list[str] | None) -> list[Format]:
    """ONNX, OpenVINO and torch.export, as `wbmm export` writes them; those whose packages are installed."""
    formats = []
    source = folder / "good.safetensors"
    for kind, suffix in FORMATS.items():
        if only and not kind.startswith(tuple(only)):
            continue
        out = folder / f"good{suffix}"
        # In a process of its own: the threads that a runtime has started do not survive a fork.
        parts = ["-m", "wbmm", "export", source, out, "--format", kind, "--size", "64", "64"]
        if subprocess.run([sys.executable, *map(str, parts)], stdout=subprocess.DEVNULL, check=False).returncode:
            continue
        beside = {".bin": out.with_suffix(".bin").read_bytes()} if suffix == ".xml" else {}
        mutations = {"bytes": mutate_bytes}
        if suffix == ".pt2":
            mutations["inside"] = mutate_zip
        formats.append(Format(kind, suffix, out.read_bytes(), {"wbmm predict": _predict}, mutations, beside=beside))
    return formats


class Network(BaseException):
    """A connection was tried."""


def _no_network(*_args, **_kwargs):
    raise Network


def _child(door: Callable[[Path], object], path: Path, report: Path) -> None:
    """Opens a file and writes what happened; never returns."""
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = _no_network
    errors = io.StringIO()
    outcome = {"what": "result", "text": ""}
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            outcome["text"] = hashlib.sha256(str(door(path)).encode()).hexdigest()
    except SystemExit:
        text = errors.getvalue().strip()
        lines = text.splitlines()
        explained = (
            "does not fit the model" in text and len(lines) <= MOST_LINES
        )  # keys, what it looks like, what to do
        clean = (len(lines) == 1 or explained) and all(map(str.isprintable, lines)) and "unexpected error" not in text
        outcome = {"what": "refused" if clean else "not one line", "text": text[-2000:]}
    except ValueError as error:  # CheckpointError among them: what callers in Python expect
        outcome = {"what": "refused", "text": str(error)[:300]}
    except runs.CorruptCheckpoint as error:
        outcome = {"what": "refused", "text": str(error)[:300]}
    except Network:
        outcome = {"what": "network", "text": traceback.format_exc()[-2000:]}
    except BaseException:
        outcome = {"what": "traceback", "text": traceback.format_exc()[-2000:]}
    report.write_text(json.dumps(outcome))
    os._exit(0)


def run_case(door: Callable[[Path], object], path: Path, report: Path) -> tuple[str, str]:
    """What became of one file at one door: (what, text)."""
    report.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _child(door, path, report)
    handle = os.pidfd_open(pid)
    try:
        finished, _, _ = select.select([handle], [], [], SECONDS)
        if not finished:
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    finally:
        os.close(handle)
    if not finished:
        return "hang", f"longer than {SECONDS} s"
    if os.WIFSIGNALED(status):
        return "signal", signal.Signals(os.WTERMSIG(status)).name
    if not report.is_file():
        return "signal", f"ended with code {os.waitstatus_to_exitcode(status)} and no word"
    grown = usage.ru_maxrss * 1024 - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if grown > MOST_MEMORY:
        return "memory", f"{grown >> 20} MiB"
    outcome = json.loads(report.read_text())
    return outcome["what"], outcome["text"]


def fuzz(formats: list[Format], count: int, seed: int, folder: Path) -> tuple[Counter, list[Finding]]:
    """Opens `count` damaged files, spread over formats, mutations and doors; returns counts and findings."""
    cases = [(f, mutation, door) for f in formats for mutation in f.mutations for door in f.doors]
    good = {}
    for form in formats:
        path = _write(form, form.data, folder)
        for name, door in form.doors.items():
            what, text = run_case(door, path, folder / "report.json")
            if what != "result":
                raise RuntimeError(f"a good {form.name} at {name}: {what} {text}")
            good[form.name, name] = text
    counts: Counter = Counter()
    findings = []
    for index in range(count):
        form, mutation, door = cases[index % len(cases)]
        key = f"{seed}/{index}"
        dice = random.Random(key)
        target = dice.choice([form.suffix, *form.beside])
        before = form.beside.get(target, form.data)
        path = _write(form, form.data, folder)
        path.with_suffix(target).write_bytes(form.mutations[mutation](before, dice))
        what, text = run_case(form.doors[door], path, folder / "report.json")
        if what == "result":
            same = text == good[form.name, door]
            what = "same result" if same else "other result"
            if not same and mutation in form.checked:
                findings.append(Finding(form.name, mutation, door, "silent change", key))
        elif what != "refused":
            findings.append(Finding(form.name, mutation, door, what, key, text))
        counts[form.name, mutation, what] += 1
    return counts, findings


def _write(form: Format, data: bytes, folder: Path) -> Path:
    path = folder / f"case{form.suffix}"
    path.write_bytes(data)
    for suffix, content in form.beside.items():
        path.with_suffix(suffix).write_bytes(content)
    return path


def table(counts: Counter) -> str:
    """Counts as Markdown: a row a format and mutation."""
    outcomes = ["refused", "same result", "other result"]
    others = sorted({what for _, _, what in counts} - set(outcomes))
    rule = "| --- | --- |" + " ---: |" * (1 + len(outcomes) + len(others))
    lines = [
        f"| file | damage | tried | {' | '.join([*outcomes, *others])} |",
        rule,
    ]
    for form, mutation in dict.fromkeys((f, m) for f, m, _ in counts):
        row = [counts[form, mutation, what] for what in [*outcomes, *others]]
        lines.append(f"| {form} | {mutation} | {sum(row)} | {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="formats, by the beginning of their names")
    parser.add_argument("--json", type=Path, help="write counts and findings there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 50, 3), np.uint8)).save(folder / "picture.png")
        formats = [*checkpoint_formats(folder), *mm_formats(), *exported_formats(folder, args.only)]
        if args.only:
            formats = [form for form in formats if form.name.startswith(tuple(args.only))]
        start = time.monotonic()
        counts, findings = fuzz(formats, args.count, args.seed, folder)
    print(table(counts))
    print(f"\n{args.count} files, seed {args.seed}: {len(findings)} findings, {time.monotonic() - start:.0f} s")
    for finding in findings:
        print(f"\n{finding.seed} {finding.format}, {finding.mutation}, {finding.door}: {finding.what}\n{finding.text}")
    if args.json:
        rows = [[*key, value] for key, value in counts.items()]
        args.json.write_text(json.dumps({"counts": rows, "findings": [asdict(finding) for finding in findings]}))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
