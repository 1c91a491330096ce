"""The package's only YAML loader, JSON loader and number readers, and their refusals."""

from __future__ import annotations

import math
import os
import re
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.records.files import (
    MOST_YAML_BYTES,
    check_writable,
    parse_json,
    parse_yaml,
    read_yaml,
    write_whole,
)
from lm_eval_moecache.records.numbers import finite, plain_number, read_count, read_number, shown
from lm_eval_moecache.sweep.files import LOCK, only_sweep

PACKAGE = Path(__file__).resolve().parents[2] / "lm_eval_moecache"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


YAML, JSON = (partial(parse, what="the file") for parse in (parse_yaml, parse_json))


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (YAML, "a: {x: 1, x: 2}\n", 'line 1: found duplicate key "x"'),
        (YAML, LAUGHS, "more than 100000 values"),
        (YAML, "&a [*a]", "refers to a value that contains it"),
        (YAML, "a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        (YAML, "[" * 100_000, "nested too deeply"),
        (YAML, "a: 2020-13-45\n", "month must be in"),
        (YAML, "a: 1" + "0" * 5000, "Exceeds the limit"),
        (YAML, "\0", "special characters are not allowed"),
        (JSON, '{"a": 1, "a": 2}', "duplicate key 'a'"),
        (JSON, "[" * 200_000, "nested too deeply"),
        (JSON, "", "Expecting value"),
        (JSON, "1" * 5000, "Exceeds the limit"),
    ],
)
def test_text_that_lies_or_explodes_is_refused_at_once(parse: Any, text: str, said: str) -> None:
    """What the corpus of bad inputs has no row of."""
    begin = time.process_time()
    with pytest.raises(ValueError, match=said) as caught:
        parse(text)
    assert str(caught.value).startswith("the file is not readable ")
    assert len(str(caught.value)) < 1000
    assert time.process_time() - begin < 10


def test_what_yaml_1_1_took_for_something_else_is_what_it_looks_like() -> None:
    data = parse_yaml("{a: no, b: on, c: 1:30, d: 010, e: 1e5, f: 0o17, g: 0x10, h: ~}", "x")
    assert list(data.values()) == ["no", "on", "1:30", 10, 1e5, 15, 16, None]


def test_anchors_and_merged_keys_are_still_yaml() -> None:
    text = "base: &base {a: 1, b: [x, y]}\nmine: {<<: *base, a: 2}\nagain: *base\n"
    data = parse_yaml(text, "x")
    assert data["mine"] == {"a": 2, "b": ["x", "y"]}
    assert data["again"] == data["base"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe", "is not text in UTF-8"), (b"a" * (MOST_YAML_BYTES + 1), "bytes, more than")],
)
def test_a_file_that_is_no_text_or_too_long_is_refused(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_yaml(tmp_path / "x.yaml", "policy='x'")


def test_what_is_no_number_is_none_in_json_both_ways() -> None:
    text = '{"a": NaN, "b": [Infinity, -Infinity, 1e999, 1e3]}'
    assert parse_json(text, "x") == {"a": None, "b": [None, None, None, 1000.0]}
    assert parse_json(f"[1{'0' * 400}, 1{'0' * 300}]", "x") == [None, 10**300]
    data = {"a": math.nan, "b": (math.inf, 1, "x", None, True)}
    assert finite(data) == {"a": None, "b": [None, 1, "x", None, True]}


@pytest.mark.parametrize(
    "value",
    [
        *("1_0", "١٢", "\uff11\uff12", "0x10", "1e9999", "inf", "nan"),
        *("", " ", "1e", "--1", "1,0", "9" * 50),
        *(True, False, None, [1], {}, math.inf, -math.inf, math.nan, 10**400),
    ],
)
def test_what_is_no_finite_plain_number_is_refused_by_key_and_value(value: Any) -> None:
    assert plain_number(value) is None
    for read in (read_number, read_count):
        with pytest.raises(ValueError, match="budget=") as caught:
            read("budget", value)
        assert shown(value) in str(caught.value)
        assert "finite, in plain digits" in str(caught.value)


@given(number=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**30), 10**30))
def test_a_finite_number_is_read_as_itself_typed_or_not(number: float) -> None:
    assert plain_number(number) == number
    if len(repr(number)) <= 40:
        assert plain_number(repr(number)) == number


@given(st.integers(-10, 10))
def test_bounds_are_kept_and_told(number: int) -> None:
    if 0 <= number <= 5:
        assert read_count("jobs", number, most=5) == number
    else:
        with pytest.raises(ValueError, match=rf"jobs={number} must be.*0 or more and at most 5"):
            read_count("jobs", number, most=5)


def modules_with(pattern: str) -> set[str]:
    """Return the modules that have it: the evaluator's, and with their names its sisters'."""
    sisters = ("moecache_plan", "moecache_lab")
    folders = {PACKAGE: PACKAGE, **{PACKAGE.parent / name: PACKAGE.parent for name in sisters}}
    return {
        str(path.relative_to(root))
        for folder, root in folders.items()
        for path in folder.rglob("*.py")
        if re.search(pattern, path.read_text())
    }


ALLOWED = {
    # All user input goes through one YAML and one JSON loader.
    r"yaml\.(safe_)?load\(|json\.loads?\(|torch\.load\(|pickle\.": {
        "records/files.py",
        # Text that was parsed before.
        "model/wall/pools.py",
        # Files shipped with the package, and the test whether a checkpoint is an adapter.
        *("tiny/documents.py", "model/checkpoint.py"),
        "profiling/use.py",
        # What a card's driver prints.
        "moecache_plan/detect.py",
        # What a form printed, and a record in a table of ours.
        *("cli/compare.py", "cli/table.py", "report/runs/files.py"),
        # Files that a run wrote for its own use, in its own folder.
        "trace/file.py",
        *("sweep/worker.py", "sweep/sharing.py", "harness/judge.py"),
    },
    # Other ways to open text stop at a byte-order mark, or split lines at Unicode's separators.
    r'\.read_text\(|open\((?!"a")[^)]*encoding=': {
        # Files shipped with the package.
        *("tiny/documents.py", "report/tables/page.py", "records/hardware.py", "cli/main.py"),
        *("harness/arguments.py", "algorithms/registry.py", "report/metrics.py"),
        # What the system or a run of ours wrote.
        *("model/device.py", "moecache_plan/detect.py"),
        *("sweep/worker.py", "sweep/sharing.py"),
    },
    # Other ways to name a file would replace a device, a pipe or a link's target.
    r"os\.(replace|rename|link)\(|shutil\.(move|copy)|\.rename\(|savefig\((?!image)": {
        "records/files.py"
    },
}
"""What is done in one place -> the modules that do it."""


@pytest.mark.parametrize("calls", ALLOWED)
def test_files_are_read_and_named_in_one_place(calls: str) -> None:
    assert modules_with(calls) == ALLOWED[calls]


def test_the_overview_needs_no_heavy_import() -> None:
    script = (
        "import sys\nfrom lm_eval_moecache.cli.main import main\nmain(['--help'])\n"
        "sys.exit(bool({'torch', 'pydantic', 'lm_eval', 'ruamel.yaml'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert process.returncode == 0, process.stderr
    assert "sweep" in process.stdout


def test_devices_and_links_are_never_replaced(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "kept.json", tmp_path / "link.json", tmp_path / "pipe"
    target.write_text("kept")
    link.symlink_to(target)
    os.mkfifo(pipe)
    for place, kind in ((link, "symbolic link"), (pipe, "device or a pipe")):
        for write in (partial(write_whole, data="new"), check_writable):
            with pytest.raises(OSError, match=kind):
                write(place)
    assert link.is_symlink() and target.read_text() == "kept" and pipe.is_fifo()
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    with pytest.raises(OSError, match="device"):
        write_whole(Path("/dev/full"), "new")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    write_whole(target, "new")
    assert target.read_text() == "new"
    folder = tmp_path / "folder"
    folder.symlink_to(tmp_path)
    check_writable(folder)  # what is made in it leaves the link alone
    with pytest.raises(OSError, match="symbolic link"):
        write_whole(folder, "new")


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    """A library opens it, and would empty the file that a link leads to."""
    target = tmp_path / "kept.txt"
    target.write_text("kept")
    (tmp_path / LOCK).symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"), only_sweep(tmp_path):
        pass
    assert target.read_text() == "kept"
