"""Measure how sensitive each layer is to lost experts, for AdapMoE's gating (routing=sensitivity).

The text is what `--tasks` are trained on (never what they are tested on), or plain text files.
"""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.learned.sensitivity import LAYERS, THRESHOLDS
from lm_eval_moecache.profiling._texts import Told, add_text_options, analyzed_texts, check_out
from lm_eval_moecache.records.artifact import SENSITIVITY, artifact_of, write_artifact


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the profile: NAME.safetensors")
    add_text_options(parser, limit=50)


def run(arguments: Namespace) -> Told:
    """Profile and write; print each layer's sensitivity and some thresholds."""
    check_out(arguments.out)
    analyzed, data = analyzed_texts(arguments)
    del data["documents"]
    geometry = analyzed.geometry
    if geometry.top_k < 2:
        raise ValueError(
            f"pretrained={arguments.pretrained!r} has one expert per token: none to leave out."
        )
    from lm_eval_moecache.model.moe_layers import router_digest
    from lm_eval_moecache.model.sensitivity import Fisher

    fisher = Fisher(analyzed)
    fisher.read()
    arrays = {LAYERS: fisher.sensitivity, THRESHOLDS: fisher.thresholds()}
    made_from = data | {"tokens": fisher.num_tokens}
    routers = router_digest(analyzed.layers)
    artifact = artifact_of(SENSITIVITY, geometry, routers, made_from, arrays)
    write_artifact(arguments.out, artifact)
    layers: list[float] = arrays[LAYERS].tolist()
    thresholds: list[float] = arrays[THRESHOLDS].tolist()
    shares = {f"{share}%": thresholds[share] for share in (10, 25, 50)}
    summary = {"out": arguments.out, "tokens": fisher.num_tokens}
    lines = [f"{arguments.out}: sensitivity from {fisher.num_tokens} tokens, in nats per token:"]
    lines += [f"  layer {layer}: {value:.4g}" for layer, value in enumerate(layers)]
    lines += [f"  {share} of the activations below {value:.4g}" for share, value in shares.items()]
    return summary | {"sensitivity": layers, "thresholds": shares}, "\n".join([*lines, ""])
