"""Workers end with their parent process: at once on Ctrl-C, and when it is killed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
NUM_TASKS = 6
SCRIPT = """
import signal, sys
from pathlib import Path
from lm_eval_moecache.sweep.pool import local_pool
from tests.sweep.test_pool import work
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    try:
        with local_pool(2) as submit:
            for future in submit(work, range({num}), sys.argv[1]):
                future.result()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


def work(number: int, folder: str) -> None:
    """Show a progress bar and leave a start marker, then outlast any test."""
    tqdm(range(1), file=io.StringIO()).close()
    (Path(folder) / f"{number}-{os.getpid()}").touch()
    time.sleep(60)


def start(folder: Path) -> subprocess.Popen[str]:
    """Start two workers in their own process group, and wait until both are working."""
    (folder / "begun").mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT.format(num=NUM_TASKS))
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder / "begun")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(list((folder / "begun").iterdir())) < 2 and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return process


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", ["interrupt as a terminal sends it", "interrupt", "kill"])
def test_workers_end_with_their_parent_and_nothing_else_begins(tmp_path: Path, how: str) -> None:
    with start(tmp_path) as process:
        send = os.killpg if "terminal" in how else os.kill
        send(process.pid, signal.SIGKILL if how == "kill" else signal.SIGINT)
        out, err = process.communicate(timeout=30)
    if how != "kill":
        assert (process.returncode, out) == (130, "interrupted\n"), err
        assert "Traceback" not in err and "leaked" not in err
    workers = {int(path.name.split("-")[1]) for path in (tmp_path / "begun").iterdir()}
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
