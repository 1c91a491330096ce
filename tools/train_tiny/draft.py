"""Trains `tiny-draft`, a separate dense model with as many layers as `tiny` and its width.

`python -m tools.train_tiny.draft --out DIR` starts from the model's attention and the mean of its
experts, and learns the text and, layer by layer, the direction of the model's hidden states: they
resemble the model's, so that the model's routers can read them, but are not equal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeForCausalLM,
    PreTrainedModel,
)

from lm_eval_moecache.tiny import MODEL_DIR
from tools.train_tiny.batches import EARLY, Batch, skill_batch, text_batch
from tools.train_tiny.network import build_model
from tools.train_tiny.text import Text
from tools.train_tiny.tokenizer import END, MAX_LENGTH, VOCAB_SIZE
from tools.train_tiny.train import (
    CHECKPOINT,
    Plan,
    Run,
    micro_loss,
    optimizers_of,
    read_command,
    update,
)

# The first step, by whose number its batches are drawn.
FIRST_STEP = 720
INTERMEDIATE = 96
# Share of noise mixed into each matrix at the start.
NOISE = 0.5
# Weight of the mean of 1 - cosine with the model's hidden states. The text alone does not make them
# alike, as the experts of version 4 have no dense model in common.
MATCH = 2.0


@torch.no_grad()
def copy_attention(
    new: PreTrainedModel, old: OlmoeForCausalLM, query_sizes: list[tuple[float, float]]
) -> None:
    """Copy all of `old` but its MLPs into a model without query and key norms.

    The projections are divided by `query_sizes`, the mean sizes by layer, instead.
    """
    state = new.state_dict()
    for name, weight in old.state_dict().items():
        if name in state and "mlp" not in name:
            state[name].copy_(weight)
    for layer, old_layer, sizes in zip(
        new.model.layers, old.model.layers, query_sizes, strict=True
    ):
        source, target = old_layer.self_attn, layer.self_attn
        target.q_proj.weight.copy_(source.q_norm.weight[:, None] * source.q_proj.weight / sizes[0])
        target.k_proj.weight.copy_(source.k_norm.weight[:, None] * source.k_proj.weight / sizes[1])


@torch.no_grad()
def query_sizes(model: OlmoeForCausalLM, ids_BS: Tensor) -> list[tuple[float, float]]:
    """Mean root-mean-square of the queries and of the keys before their norm, by layer."""
    sizes: list[list[float]] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
        sizes[-1].append(float(inputs[0].pow(2).mean(-1).sqrt().mean()))

    handles = [
        norm.register_forward_hook(note)
        for layer in model.model.layers
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)
    ]
    sizes.append([])
    model(input_ids=ids_BS)
    for handle in handles:
        handle.remove()
    return list(zip(sizes[0][::2], sizes[0][1::2], strict=True))


@contextmanager
def states_of(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect what each layer returns (B, S, D)."""
    states = list[Tensor]()

    def note(_: nn.Module, __: object, output: Tensor) -> None:
        states.append(output)

    handles = [layer.register_forward_hook(note) for layer in model.model.layers]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


class Training:
    """A run with its target and text.

    Its batches are of the first mixture, with fewer word problems and more facts than the last: on
    those the draft would predict nearly all words of a solution and too few answers.
    """

    def __init__(self, plan: Plan, out: Path, cache: Path) -> None:
        self.plan = plan
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
        self.text = Text(self.tokenizer, cache, out / "text")
        torch.manual_seed(plan.seed)
        model = self.first_model()
        self.run = Run(model, optimizers_of(model, plan), out / CHECKPOINT, FIRST_STEP)
        if self.run.file.exists():
            self.run.resume()
        plain = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
        self.target = build_model(plain.config).eval()
        self.target.load_state_dict(plain.state_dict())

    @torch.no_grad()
    def first_model(self) -> PreTrainedModel:
        tokens = [self.tokenizer.pad_token, END]
        pad_id, end_id = self.tokenizer.convert_tokens_to_ids(tokens)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=8,
            num_attention_heads=4,
            max_position_embeddings=MAX_LENGTH,
            rms_norm_eps=1e-5,
            initializer_range=0.05,
            pad_token_id=pad_id,
            bos_token_id=end_id,
            eos_token_id=end_id,
        )
        new = LlamaForCausalLM(config)
        old = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
        text, _ = self.batches(FIRST_STEP)
        copy_attention(new, old, query_sizes(old, text.ids_BS))
        for layer, old_layer in zip(new.model.layers, old.model.layers, strict=True):
            gate_up, down = (
                weight.mean(0)
                for weight in (old_layer.mlp.experts.gate_up_proj, old_layer.mlp.experts.down_proj)
            )
            width = down.shape[1]
            gate, up = gate_up.chunk(2)
            layer.mlp.gate_proj.weight[:width] = gate
            layer.mlp.up_proj.weight[:width] = up
            layer.mlp.down_proj.weight[:, :width] = 2 * down
        torch.manual_seed(self.plan.seed)
        for name, weight in new.named_parameters():
            if "_proj" in name:
                weight.lerp_(weight.std() * torch.randn_like(weight), NOISE)
        return new

    def batches(self, step: int) -> tuple[Batch, Batch]:
        """Return a step's batches of English and of problems."""
        rng = Random(f"batch/{self.plan.seed}/{step}")
        return text_batch(self.text, rng), skill_batch(self.tokenizer, rng, EARLY)

    def advance(self) -> None:
        """Take one step; in place of the balance, the curve has the mean of 1 - cosine."""
        run, losses, apart = self.run, list[Tensor](), list[Tensor]()
        for batch in self.batches(run.step):
            run.num_tokens += batch.ids_BS.numel()
            with states_of(run.model) as mine:
                losses.append(micro_loss(run.model, batch)[0])
            with torch.no_grad(), states_of(self.target) as theirs:
                self.target.model(batch.ids_BS, attention_mask=batch.mask, use_cache=False)
            real_BS = batch.ids_BS >= 0 if batch.document_BS is None else batch.document_BS >= 0
            pairs = zip(mine, theirs, strict=True)
            cosines = [torch.cosine_similarity(a, b, -1)[real_BS].mean() for a, b in pairs]
            apart.append(1 - torch.stack(cosines).mean())
        text, skills = losses
        distance = torch.stack(apart).mean()
        (text + self.plan.skill_weight * skills + MATCH * distance).backward()  # type: ignore[no-untyped-call]
        share = update(run.model.parameters(), run.optimizers, self.plan, run.step)
        run.curve.add(run.step, text.item(), skills.item(), distance.item(), share)
        run.step += 1


def main() -> None:
    """Train to the end of the plan, or until the file `stop` appears."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    preset = Plan(steps=FIRST_STEP + 600, rate=2e-3, adam_rate=1.5e-3, warmup=20, decay_steps=100)
    plan, out, cache, save_every = read_command(preset, __doc__)
    training = Training(plan, out, cache)
    run = training.run
    while run.step < plan.steps:
        training.advance()
        run.log()
        if run.step % save_every == 0:
            run.save()
        if (out / "stop").exists():
            run.save()
            (out / "stop").unlink()
            return
    run.save()
    facts = {"from": "version 4 of tiny", "target": "../model"}
    run.finish(out, training.tokenizer, plan, facts)


if __name__ == "__main__":
    main()
