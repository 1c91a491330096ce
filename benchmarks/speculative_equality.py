"""Count the prompts on which speculative decoding gives the tokens of plain greedy decoding.

    python benchmarks/speculative_equality.py [--prompts 200] [--dtype float32] [--draft_tokens 1,2]

Two drafts: the model's own weights at 4 bits, which are nearly always right, and one layer of the
same architecture that was never trained, which is nearly always wrong. In bfloat16 every
divergence is looked at: the two tokens must tie within the rounding of their logits.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.spec_lm import MoECacheSpecLM
from lm_eval_moecache.tiny import MODEL_DIR
from lm_eval_moecache.tiny.generator import ASKED, held_out

STOP = {"until": ["Q:", "Question:", "\n\n"], "max_gen_toks": 48}
Rows = list[list[int]]


def prompts(count: int) -> list[str]:
    """Half word problems, half BBH, from the test split of the offline tasks."""
    word = held_out(ASKED["gsm8k"], count // 2, 0)
    logic = held_out(ASKED["bbh"], count - count // 2, 0)
    return [
        *(f"Question: {p.row['question']}\nAnswer:" for p in word),
        *(f"{p.row['description']}\n\nQ: {p.row['input']}\nA:" for p in logic),
    ]


def generate(lm: MoECacheLM, texts: list[str]) -> Rows:
    rows: dict[int, list[int]] = {}
    inner = lm._generate

    def keep(context: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner(context, *args, **kwargs)
        row = output[0, context.shape[1] :].tolist()
        rows[lm._batch[0].index] = row[: lm._count_output(row, kwargs["stop"])]
        return output

    lm._generate = keep  # type: ignore[method-assign]
    asked = [Instance("generate_until", {}, (t, STOP), i, ("t", i, 1)) for i, t in enumerate(texts)]
    lm.generate_until(asked, disable_tqdm=True)
    del lm._generate
    return [rows[index] for index in sorted(rows)]


def never_trained(folder: Path) -> str:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(str(MODEL_DIR), num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(MODEL_DIR)).save_pretrained(folder)
    return str(folder)


def ties(model: Any, context: list[int], first: int, second: int) -> bool:
    """Whether both tokens are the best within two bfloat16 steps of the best logit."""
    with torch.no_grad():
        logits = model(torch.tensor([context])).logits[0, -1].float()
    best = float(logits.max())
    step = 2 * 2.0 ** (torch.floor(torch.log2(torch.tensor(abs(best)))).item() - 7)
    return min(float(logits[first]), float(logits[second])) >= best - step


def compare(expected: Rows, found: Rows, texts: list[str], tokenizer: Any, model: Any) -> str:
    differing = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
    tied = 0
    for i in differing:
        pairs = enumerate(zip(expected[i], found[i], strict=False))
        at = next((at for at, (a, b) in pairs if a != b), None)
        if at is None:
            continue  # one is the beginning of the other: not a tie
        context = tokenizer(texts[i]).input_ids + expected[i][:at]
        tied += ties(model, context, expected[i][at], found[i][at])
    equal = len(texts) - len(differing)
    return f"{equal} of {len(texts)} equal, {len(differing)} diverge, {tied} of them at a tie"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft_tokens", default="1,2,4,8")
    parser.add_argument("--drafts", default="self:int4,untrained")
    asked = parser.parse_args()
    texts = prompts(asked.prompts)
    usual: dict[str, Any] = {"pretrained": "tiny", "device": "cpu", "dtype": asked.dtype}
    plain = MoECacheLM(policy="on_demand", **usual)
    expected = generate(plain, texts)
    print(f"{asked.dtype}: {sum(map(len, expected))} tokens decoded greedily", flush=True)
    dtype = getattr(torch, asked.dtype)
    model = AutoModelForCausalLM.from_pretrained(str(MODEL_DIR), dtype=dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        paths = {"untrained": never_trained(Path(folder))}
        spec = MoECacheSpecLM(policy="sp_moe", **usual)
        for name in asked.drafts.split(","):
            # One layer foretells nothing of the model's eight: only a draft of as many is asked.
            policy = "on_demand" if name in paths else "sp_moe"
            for tokens in map(int, asked.draft_tokens.split(",")):
                ours = {"policy": policy, "draft": paths.get(name, name), "draft_tokens": tokens}
                spec.install(read_config(ours, speculative=True))
                verdict = compare(expected, generate(spec, texts), texts, spec.tokenizer, model)
                accepted = f"{spec.report()['totals']['draft_acceptance']:.4f}"
                line = f"draft {name}, {tokens} tokens: {verdict}; acceptance {accepted}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
