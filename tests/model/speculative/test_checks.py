"""A draft that does not fit is a ValueError before any weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models

from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
from lm_eval_moecache.model.speculative import measure
from lm_eval_moecache.tiny import MODEL_DIR
from tests.conftest import Moecache
from tests.harness import assert_loads, says
from tests.harness import refusal as refusal_of


def refusal(kind: type[MoECacheLM] = MoECacheSpecLM, **arguments: Any) -> str:
    return refusal_of(kind, **{"policy": "sp_moe", **arguments})


def shape_of(folder: Path, tokenizer: str | None = str(MODEL_DIR), **changes: Any) -> str:
    """A folder with the configuration of `tiny`, changed, and no weights."""
    folder.mkdir(exist_ok=True)
    config = json.loads((MODEL_DIR / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    if tokenizer is not None:
        transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return str(folder)


def test_good_arguments_reach_the_loading(tmp_path: Path) -> None:
    drafts = (shape_of(tmp_path / "good"), shape_of(tmp_path / "bare", tokenizer=None), "tiny")
    for draft in drafts:
        assert_loads(MoECacheSpecLM, policy="sp_moe", draft=draft)


def test_a_codec_that_cannot_store_the_experts_is_refused(tmp_path: Path) -> None:
    folder = shape_of(tmp_path, hidden_size=36, intermediate_size=36)
    for draft in ("self:int4/g7", "self:hqq2/g256"):
        says(refusal(pretrained=folder, draft=draft), f"draft={draft!r}", "group")


def test_a_draft_that_reads_along_may_be_of_the_models_size_alone(tmp_path: Path) -> None:
    assert_loads(policy="sp_moe", draft="tiny")
    bad = shape_of(tmp_path / "wide", hidden_size=64)
    says(refusal(MoECacheLM, draft=bad), "hidden_size=64", "prefetch='draft'")


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    says(refusal(draft=shape_of(tmp_path / "size", vocab_size=999)), "999", "4096", "tokenizer")
    other = tmp_path / "other"
    words = {f"word{i}": i for i in range(4096)}
    core = Tokenizer(models.WordLevel(words, unk_token="word0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(other)
    draft = shape_of(tmp_path / "same_size", tokenizer=str(other))
    says(refusal(draft=draft, policy="on_demand"), "tokens that are not the model's", "4096")


def test_other_layers_or_sizes_draft_but_cannot_be_prefetched_from(tmp_path: Path) -> None:
    for changes, *parts in (
        ({"num_hidden_layers": 6}, "num_hidden_layers=6", "8", "layers must be equal"),
        ({"hidden_size": 64}, "hidden_size=64", "128", "hidden size must be equal"),
    ):
        draft = shape_of(tmp_path / "other", **changes)
        says(refusal(draft=draft), "prefetch='draft'", *parts)
        assert_loads(MoECacheSpecLM, policy="mixtral_offloading", draft=draft)


def test_a_draft_without_blocks_that_can_be_told_is_refused(tmp_path: Path) -> None:
    draft = tmp_path / "opt"
    config = transformers.OPTConfig(
        vocab_size=4096, hidden_size=8, ffn_dim=8, num_hidden_layers=2, num_attention_heads=2
    )
    config.save_pretrained(draft)
    transformers.AutoTokenizer.from_pretrained(str(MODEL_DIR)).save_pretrained(draft)
    says(refusal(draft=str(draft), policy="on_demand"), "OPTForCausalLM", "cannot be timed")


def test_a_replay_of_a_plain_run_has_no_draft(trace: Path, moecache: Moecache) -> None:
    message = moecache("replay", trace, "--policy", "sp_moe", code=2)
    says(message, "prefetch='draft'", "a live run with draft=", "a replay of such a run")


def test_a_dense_draft_is_one_expert_a_layer() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(vocab_size=300, num_attention_heads=4, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    blocks, geometry = measure(model, "dense")
    assert [block.decoder_layer for block in blocks] == [0, 1, 2]
    assert geometry.expert_bytes == ((3 * 32 * 48 * 4,),) * 3
    total = sum(p.numel() * 4 for p in model.parameters())
    measured = sum(geometry.dense_bytes) + geometry.total_expert_bytes
    assert measured == total - 300 * 32 * 4  # a pass reads single rows of the embedding
