"""A user's class that cannot be used is named with its file and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.records.geometry import Geometry

HEAD = "from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm\n"
WHOLE = """
    source = "test"
    def on_insert(self, key, prefetched): pass
    def on_evict(self, key): pass
    def victim(self, pinned, layer): return None
"""
GEOMETRY = Geometry(
    model="x", num_layers=1, num_experts=2, top_k=1, expert_bytes=((1,),), dense_bytes=(0,)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0\n", ["cannot be imported: ZeroDivisionError", "mine.py, line 1"]),
        ("def broken(:\n", ["cannot be imported: SyntaxError"]),
        ("import nothing_of_that_name\n", ["cannot be imported: ModuleNotFoundError"]),
        ("raise RuntimeError('no device')\n", ["RuntimeError: no device", "mine.py, line 1"]),
        ("x = 1\n", ["cannot be imported: AttributeError"]),
        ("class Mine: pass\n", ["is not a subclass of"]),
        (f"{HEAD}class Mine(EvictionAlgorithm): pass\n", ["is abstract", "victim", "mine.py"]),
        (
            f"{HEAD}class Mine(EvictionAlgorithm):{WHOLE}    def __init__(self, geometry): pass\n",
            ["must take (geometry, *, seed, ...)", "seed", "mine.py"],
        ),
        (
            f"{HEAD}class Mine(EvictionAlgorithm):{WHOLE}"
            "    def __init__(self, geometry, *, seed=0, a: 'Nothing' = 1): pass\n",
            ["must be importable", "Nothing", "mine.py"],
        ),
        (
            f"{HEAD}class Mine(EvictionAlgorithm):{WHOLE}"
            "    def __init__(self, geometry, *, seed=0): raise KeyError('weights')\n",
            ["its constructor raised KeyError: 'weights'", "mine.py"],
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_named_with_file_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str]
) -> None:
    name = f"mine_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"eviction") as caught:
        load_policy("on_demand", {"eviction": f"{name}.Mine"}).eviction.build(GEOMETRY, 0)
    for word in words:
        assert word.replace("mine.py", f"{name}.py") in str(caught.value)
