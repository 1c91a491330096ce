"""All skills behind one call: deterministic problems of one side of the split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from lm_eval_moecache.tiny import (
    bbh_logic,
    bbh_order,
    bbh_space,
    bbh_walk,
    gsm8k,
    knowledge,
    wikitext,
)
from lm_eval_moecache.tiny.problem import Problem, Split

MOST_DRAWS = 20

Maker = Callable[[Random], Problem]

Asking = Callable[[Random], tuple[str, str]]

BBH: dict[str, tuple[str, Asking]] = {
    "boolean_expressions": (
        "Evaluate the result of a random Boolean expression.",
        bbh_logic.boolean_expressions,
    ),
    "web_of_lies": (
        "Evaluate a random boolean function expressed as a word problem.",
        bbh_logic.web_of_lies,
    ),
    "object_counting": (
        "Questions that involve enumerating objects and asking the model to count them.",
        bbh_logic.object_counting,
    ),
    "navigate": (
        "Given a series of navigation instructions, determine whether one would end up back at "
        "the starting point.",
        bbh_walk.navigate,
    ),
    "tracking_shuffled_objects_three_objects": (
        "A task requiring determining the final positions of a set of objects given their "
        "initial positions and a description of a sequence of swaps.",
        bbh_space.tracking_shuffled_objects,
    ),
    "logical_deduction_three_objects": (
        "A logical deduction task which requires deducing the order of a sequence of objects.",
        bbh_order.logical_deduction,
    ),
    "hyperbaton": (
        "Order adjectives correctly in English sentences.",
        bbh_space.hyperbaton,
    ),
}


# What tiny_mmlu and tiny_bbh ask. The kinds whose options are shuffled among letters are in the
# training only, and stay near chance: that takes more tokens than two CPU cores read in an hour.
MMLU_ASKED = ("mmlu/fixed",)
BBH_ASKED = (
    "bbh/boolean_expressions",
    "bbh/web_of_lies",
    "bbh/object_counting",
    "bbh/navigate_long",
)


def bbh_maker(kind: str, harder: Asking | None = None) -> Maker:
    """A maker of one BBH subtask in the prompt of lm-eval's `bbh_zeroshot_<kind>`."""
    description, ask = BBH[kind]
    ask = harder or ask

    def make(rng: Random) -> Problem:
        question, answer = ask(rng)
        return Problem(
            skill="bbh",
            kind=kind,
            prompt=f"{description}\n\nQ: {question}\nA:",
            target=answer,
            key=f"{kind}/{question}",
            row={"input": question, "target": answer, "kind": kind, "description": description},
        )

    return make


MAKERS: dict[str, Maker] = {
    "gsm8k": gsm8k.make,
    "mmlu": knowledge.make_mmlu,
    "arc": knowledge.make_arc,
    "truthfulqa": knowledge.make_truthfulqa,
    "wikitext": wikitext.make,
    **{f"bbh/{kind}": bbh_maker(kind) for kind in BBH},
}


# Came after the tokenizer, which is trained on MAKERS.
AUXILIARY: dict[str, Maker] = {
    "bbh/navigate_long": bbh_maker("navigate", bbh_walk.navigate_long),
    "mmlu/open": knowledge.make_open,
    "mmlu/easy": knowledge.make_easy,
    "mmlu/copy": knowledge.make_copy,
    "mmlu/fixed": knowledge.make_fixed,
}


def problems(name: str, split: Split, rng: Random) -> Iterator[Problem]:
    """Endless problems of one maker that the split rule puts on that side."""
    make = (MAKERS | AUXILIARY)[name]
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
    seen, chosen, drawn = set[tuple[str, str]](), list[Problem](), 0
    while len(chosen) < count:
        problem = next(streams[len(chosen) % len(streams)])
        drawn += 1
        if drawn > MOST_DRAWS * count:
            raise ValueError(f"{names} have only {len(chosen)} {split} problems, not {count}")
        mark = (problem.prompt, repr(sorted(problem.row.items())))
        if mark not in seen:
            seen.add(mark)
            chosen.append(problem)
    return chosen
