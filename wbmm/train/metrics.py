"""metrics.jsonl: one JSON object a line, each step once, whatever the interruptions."""

import json
import os
from pathlib import Path

__all__ = ["FILE", "MetricsFile", "read_metrics", "write_text"]

FILE = "metrics.jsonl"


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


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once: a crash leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class MetricsFile:
    """Appends records; on resume it first drops those after the step that the run restarts from.

    A new run in a folder that has metrics keeps the old ones as `metrics.old.jsonl`.
    """

    def __init__(self, out: Path, resumed_step: int | None):
        path = out / FILE
        if path.exists() and resumed_step is None:
            path.replace(out / "metrics.old.jsonl")
        elif path.exists():
            kept = [record for record in read_metrics(out) if record["step"] <= resumed_step]
            write_text(path, "".join(f"{json.dumps(record)}\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
