"""Processes whose parent is killed: who they are, and whether they end."""

import os
import signal
import subprocess
import time
from pathlib import Path


def kill_and_count_orphans(process: subprocess.Popen, workers: int, seconds: float = 120) -> int:
    """Waits until a process has so many children, kills it with SIGKILL, and counts those that outlive it by 10 s."""
    children = _wait(lambda: _children(process.pid), lambda found: len(found) >= workers, process, seconds)
    time.sleep(2)  # they have started, and read something
    process.kill()
    process.wait()
    left = _wait(lambda: [pid for pid in children if _is_running(pid)], lambda found: not found, None, 10)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def _wait(look, good, process, seconds):
    end = time.monotonic() + seconds
    while not good(found := look()) and time.monotonic() < end:
        if process is not None and process.poll() is not None:
            raise AssertionError(f"it ended by itself: {process.communicate()}")
        time.sleep(0.2)
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
