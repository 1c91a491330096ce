"""pass@k of one document's sampled answers: the unbiased estimate of Chen et al. (2021)."""

from math import comb


def process_results(doc: dict, results: list) -> dict[str, float]:
    """Return pass@k for k = 1 and 4, of as many answers as the task repeats."""
    answers = results[0] if isinstance(results[0], list) else results
    right = doc["answer"].split("#### ")[-1]
    wrong = sum(answer.replace(",", "").rstrip(".") != right for answer in answers)
    return {f"pass@{k}": 1 - comb(wrong, k) / comb(len(answers), k) for k in (1, 4)}
