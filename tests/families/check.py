"""Checks one model type end to end and fills its row of the table."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.models.huggingface import HFLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.preflight import check_arguments
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.weighting import find_rule
from lm_eval_moecache.trace.importers import load_trace
from tests.families.configs import causal_types, small_model
from tests.harness import make_instance
from tests.models import byte_tokenizer

HOST: dict[str, Any] = {"device": "cpu", "max_length": 400, "dtype": "float32"}
EQUAL, AS_HF, RUNS, REFUSED, FAILED = "equal", "as hf", "runs", "refused", "FAILED"
ON_DEMAND = {"policy": "on_demand", "capacity": "25%"}
PREFETCHING = {"policy": "specmd", "capacity": "25%"}
LOSSY = ({**ON_DEMAND, "routing": "swap_rank"}, {**ON_DEMAND, "miss": "drop", "miss.h": "1"})
ALONE, BATCHED = 1, 4
WORDS = (3, 9, 17, 28, 42, 60)
"""Of the prompts: those of a batch are unlike."""
ASKED: dict[str, Any] = {
    **{"until": ["t", "i", "n"], "max_gen_toks": 10},
    # What the tokenizer has no text for: HFLM finds stops in it, behind which a row may go on.
    "suppress_tokens": [0, *range(258, 300)],
}


@dataclass
class Row:
    """One model type's results: a cell is one of the words above, or `-` where none applies."""

    model_type: str
    virtual: str = "-"
    batch: str = "-"
    prefetching: str = "-"
    trace: str = "-"
    lossy: str = "-"
    wall_ram: str = "-"
    wall_disk: str = "-"
    router: str = ""
    rule: str = ""
    reasons: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        cells = (self.virtual, self.batch, self.prefetching, self.trace, self.lossy)
        if FAILED in (*cells, self.wall_ram, self.wall_disk):
            return FAILED
        return REFUSED if self.virtual == REFUSED else RUNS

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, **asdict(self)}


def save(folder: Path, model_type: str) -> Path:
    """Write a loadable checkpoint, or for a type without a causal model its configuration."""
    if model_type in causal_types():
        model = small_model(model_type)
        # As checkpoints have it: else HFLM finds the end by its text, behind which a row goes on.
        model.generation_config.eos_token_id = 1
        model.save_pretrained(folder)
    else:
        CONFIG_MAPPING[model_type]().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


class Answers(NamedTuple):
    texts: list[str]
    scores: list[tuple[float, bool]]


def answers(lm: Any, batch_size: int) -> Answers:
    """Return generations, which end at different tokens, and scores, of prompts of unequal length.

    The longest prompts come last, and HFLM serves them first: those that follow them in a batch's
    place are shorter.
    """
    lm.batch_size_per_gpu = batch_size
    words = "the cat sat on a mat and then Tom gave 12 apples to Mia who had 7 of them left".split()
    prompts = [" ".join((words * 4)[start : start + n]) for start, n in enumerate(WORDS)]
    asked = [
        make_instance("generate_until", "g", i, prompt, dict(ASKED))
        for i, prompt in enumerate(prompts)
    ]
    chosen = [
        make_instance("loglikelihood", "l", i, prompt, end, choice=j)
        for i, prompt in enumerate(prompts)
        for j, end in enumerate((" A", " no it is not"))
    ]
    texts = lm.generate_until(asked, disable_tqdm=True)
    return Answers(texts, lm.loglikelihood(chosen, disable_tqdm=True))


def differs(found: Answers, expected: Answers, most: float = 0.0) -> bool:
    """Whether answers differ, or a score by more than `most` nats."""
    pairs = zip(found.scores, expected.scores, strict=True)
    return found.texts != expected.texts or any(abs(a - b) > most for (a, _), (b, _) in pairs)


class Checked:
    """One model type's checkpoint and the answers that all settings are compared with."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.row = row
        self.folder = folder
        self.path = str(save(folder / "model", row.model_type))
        self.plain: dict[int, Answers] = {}

    def ask_plain(self) -> None:
        """Ask the model without a cache, alone and in batches."""
        plain = HFLM(pretrained=self.path, **HOST)
        self.plain = {size: answers(plain, size) for size in (ALONE, BATCHED)}

    @property
    def changes(self) -> bool:
        """Whether the plain model's answers change with a batch, by more than rounding."""
        return differs(self.plain[BATCHED], self.plain[ALONE], most=1e-3)

    def is_refused(self, ours: Mapping[str, str]) -> bool:
        """Whether a setting is refused before anything is loaded; the reason goes into the row."""
        try:
            check_arguments(self.path, {**HOST, **ours})
        except ValueError as error:
            reason = str(error).replace(self.path, self.row.model_type)
            if reason not in self.row.reasons:
                self.row.reasons.append(reason)
            return True
        return False

    def load(self, ours: Mapping[str, str]) -> MoECacheLM:
        return MoECacheLM(pretrained=self.path, **HOST, **ours)

    def judge(self, lm: MoECacheLM, ours: Mapping[str, str]) -> str:
        """Compare a lossless setting's answers with those of the plain model, bit for bit."""
        found = answers(lm, ALONE)
        lm.engine.check_integrity()
        if not differs(found, self.plain[ALONE]):
            return EQUAL
        self.row.reasons.append(f"{dict(ours)}: answers differ")
        return FAILED

    def in_batches(self, lm: MoECacheLM) -> str:
        """Compare answers in batches with the plain model's in the same batches.

        Rows take the places of those that have ended: where padding changes the plain model's
        texts, they need not be those of its own batches. Scores are.
        """
        found, expected = answers(lm, BATCHED), self.plain[BATCHED]
        lm.engine.check_integrity()
        texts = expected.texts if not self.changes else found.texts
        if differs(found, Answers(texts, expected.scores), most=1e-4):
            self.row.reasons.append(f"in batches: {found}, and plain {expected}")
            return FAILED
        return AS_HF if self.changes else EQUAL

    def under_virtual_clock(self) -> None:
        row, lm = self.row, self.load(ON_DEMAND)
        gate = find_moe_layers(lm.model)[-1].gate
        row.router, rule = gate.name, find_rule(gate)
        row.rule = "" if rule is None else rule.raw.__name__
        row.virtual, row.batch = self.judge(lm, ON_DEMAND), self.in_batches(lm)
        row.prefetching = row.trace = row.lossy = REFUSED
        if not self.is_refused(PREFETCHING):
            row.prefetching, row.trace = self.replayed(lm)
        if not any(self.is_refused(setting) for setting in LOSSY):
            row.lossy = self.lossy(lm)
        lm.wrapped.unwrap()

    def replayed(self, lm: MoECacheLM) -> tuple[str, str]:
        """Run the default policy and replay its trace."""
        lm.install(read_config({**PREFETCHING, "trace": str(self.folder / "traces")}))
        verdict = self.judge(lm, PREFETCHING)
        trace = load_trace(str(lm.finish_trace()), logits=True, predicted=True)
        engine = replay(trace, lm.engine.setting)
        return verdict, EQUAL if engine.ledger.passes == lm.engine.ledger.passes else FAILED

    def lossy(self, lm: MoECacheLM) -> str:
        """Run lossy algorithms: they change something, and leave the model as it was."""
        for setting in LOSSY:
            lm.install(read_config(setting))
            answers(lm, BATCHED)
            passes = lm.engine.ledger.passes
            assert sum(p.unfaithful + p.dropped for p in passes) > 0, f"{setting} changed nothing"
        lm.install(read_config(ON_DEMAND))
        return RUNS if self.judge(lm, ON_DEMAND) == EQUAL else FAILED

    def under_wall_clock(self, **store: str) -> str:
        setting = {**ON_DEMAND, "clock": "wall", **store}
        if self.is_refused(setting):
            return REFUSED
        lm = self.load(setting)
        verdict = self.judge(lm, setting)
        lm.wrapped.unwrap()
        return verdict


def check(model_type: str) -> Row:
    """Check a model type on random weights; failures go into its row, and none is raised."""
    row = Row(model_type)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _fill(row, Checked(row, Path(folder)))
        except Exception as error:
            # Any error of a model's code belongs in the table.
            row.reasons.append(f"{type(error).__name__}: {error}")
            row.virtual = FAILED
    return row


def _fill(row: Row, checked: Checked) -> None:
    if checked.is_refused(ON_DEMAND):
        row.virtual = REFUSED
        return
    assert row.model_type in causal_types(), "loadable, but not as a causal language model"
    checked.ask_plain()
    checked.under_virtual_clock()
    row.wall_ram = checked.under_wall_clock(store="ram")
    row.wall_disk = checked.under_wall_clock(store="disk", store_dir=str(checked.folder))
