"""metrics.jsonl: one JSON object a line, each step once, whatever the interruptions."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

__all__ = ["FILE", "MetricsFile", "read_metrics", "replacing", "working_seconds", "write_text", "writing"]

FILE = "metrics.jsonl"
BREAK_S = 600  # without `seconds`: two records further apart than this are not one stretch of training


def read_metrics(run_dir: str | Path) -> list[dict]:
    """The records of a run. A line cut short by a crash is left out."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise ValueError(f"no {FILE} in {run_dir}: not the folder of a run")
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [record for record in records if isinstance(record, dict) and "step" in record]


def working_seconds(records: list[dict]) -> float:
    """The time spent in training up to the last record, without the time between sittings.

    Each record says so in `seconds`. Those of older versions hold the time of day alone, from which it is guessed.
    """
    if records and "seconds" in records[-1]:
        return records[-1]["seconds"]
    gaps = (after - before for before, after in pairwise(record["time"] for record in records if "time" in record))
    return sum(gap for gap in gaps if gap < BREAK_S)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to; the file takes the place of `path` at once when the block ends well, and vanishes if not."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once: a crash leaves the old one or the new one."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk, and any other error in writing a run's file, into one line that says how to go on."""
    try:
        yield
    except OSError as error:
        room = ""
        with suppress(OSError):
            room = f" ({shutil.disk_usage(path.parent).free / 2**20:,.0f} MB free on that disk)"
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}{room}. What was saved before is intact: "
            "make room, then continue with resume=auto"
        ) from error


class MetricsFile:
    """Appends records; on resume it first drops those after the step that the run restarts from.

    A new run in a folder that has metrics keeps the old ones as `metrics.old.jsonl`.

    Attributes:
        kept: The records from before the resumed step.
    """

    def __init__(self, out: Path, resumed_step: int | None):
        path = out / FILE
        self.kept: list[dict] = []
        if path.exists() and resumed_step is None:
            path.replace(out / "metrics.old.jsonl")
        elif path.exists():
            self.kept = [record for record in read_metrics(out) if record["step"] <= resumed_step]
            write_text(path, "".join(f"{json.dumps(record)}\n" for record in self.kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
