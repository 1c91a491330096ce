"""All skills behind one call: deterministic problems from one side of the split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random

from tools.train_tiny.skills import bbh, gsm8k, knowledge, pages
from tools.train_tiny.skills.problem import Problem, Split

MOST_DRAWS = 40
GRADES = (1, 2, 3)

Maker = Callable[[Random], Problem]

Asking = Callable[[Random, int], tuple[str, str]]

BBH: dict[str, tuple[str, Asking]] = {
    "boolean_expressions": (
        "Evaluate the result of a random Boolean expression.",
        bbh.boolean_expressions,
    ),
    "web_of_lies": (
        "Evaluate a random boolean function expressed as a word problem.",
        bbh.web_of_lies,
    ),
    "object_counting": (
        "Questions that involve enumerating objects and asking the model to count them.",
        bbh.object_counting,
    ),
    "navigate": (
        "Given a series of navigation instructions, determine whether one would end up back at "
        "the starting point.",
        bbh.navigate,
    ),
}


def bbh_maker(kind: str, grade: int) -> Maker:
    """Return a maker of one BBH subtask with the prompt of lm-eval's `bbh_zeroshot_<kind>`."""
    description, ask = BBH[kind]

    def make(rng: Random) -> Problem:
        question, answer = ask(rng, grade)
        return Problem(
            skill="bbh",
            kind=kind,
            prompt=f"{description}\n\nQ: {question}\nA:",
            target=answer,
            key=f"{kind}/{question}",
            row={"input": question, "target": answer, "kind": kind, "description": description},
        )

    return make


_GRADED: Mapping[str, Callable[[int], Maker]] = {
    "gsm8k": gsm8k.maker,
    "mmlu": knowledge.fixed_maker,
    "arc": knowledge.arc_maker,
    "truthfulqa": knowledge.truthfulqa_maker,
    **{f"bbh/{kind}": partial(bbh_maker, kind) for kind in BBH},
}
# `<skill>/<grade>`, the hardest grade last.
MAKERS: dict[str, Maker] = {
    f"{name}/{grade}": maker(grade) for grade in GRADES for name, maker in _GRADED.items()
}
# Training only.
AUXILIARY: dict[str, Maker] = {
    "pages": pages.make,
    "mmlu/shuffled": knowledge.make_shuffled,
    "mmlu/open": knowledge.make_open,
    "mmlu/letters": knowledge.make_letters,
}
# Test only.
MISSPELT: dict[str, Maker] = {
    f"{name}/misspelt": knowledge.misspelling_maker(tuple(map(maker, GRADES)))
    for name, maker in (
        ("mmlu", knowledge.fixed_maker),
        ("arc", knowledge.arc_maker),
        ("truthfulqa", knowledge.truthfulqa_maker),
    )
}
# Each task's makers, which take turns; a maker named twice has two turns.
ASKED: dict[str, tuple[str, ...]] = {
    "gsm8k": ("gsm8k/1", *("gsm8k/2",) * 3, "gsm8k/3"),
    "mmlu": ("mmlu/misspelt", "mmlu/misspelt", "mmlu/3"),
    "arc": ("arc/misspelt", "arc/misspelt", "arc/3"),
    "truthfulqa": ("truthfulqa/misspelt",),
    "bbh": tuple(f"bbh/{kind}/{grade}" for grade in GRADES for kind in BBH),
}


def problems(name: str, split: Split, rng: Random) -> Iterator[Problem]:
    """Yield endless problems of one maker from one side of the split."""
    make = (MAKERS | AUXILIARY | MISSPELT)[name]
    while True:
        problem = make(rng)
        if problem.split == split:
            yield problem


def held_out(names: tuple[str, ...], count: int, seed: int) -> list[Problem]:
    """`count` different test problems, the makers in `names` taking turns."""
    return distinct(names, count, seed, "test")


def distinct(names: tuple[str, ...], count: int, seed: int, split: Split) -> list[Problem]:
    """`count` different problems of one split, the makers in `names` taking turns."""
    streams = [problems(name, split, Random(f"{name}/{seed}")) for name in names]
    seen, chosen, num_drawn = set[tuple[str, str]](), list[Problem](), 0
    while len(chosen) < count:
        problem = next(streams[len(chosen) % len(streams)])
        num_drawn += 1
        if num_drawn > MOST_DRAWS * count:
            raise ValueError(f"{names} have only {len(chosen)} {split} problems, not {count}")
        identity = (problem.prompt, repr(sorted(problem.row.items())))
        if identity not in seen:
            seen.add(identity)
            chosen.append(problem)
    return chosen
