"""The action `moecache profile sensitivity`."""

from __future__ import annotations

from typing import Any

from lm_eval_moecache.algorithms.learned.sensitivity import LAYERS, THRESHOLDS
from lm_eval_moecache.profiling._texts import TEXT, analyzed_texts, check_out
from lm_eval_moecache.records.artifact import SENSITIVITY, artifact_of, write_artifact
from lm_eval_moecache.records.command import Report, with_options


@with_options(TEXT, limit=50)
def profile_sensitivity(*, out: str, **given: Any) -> Report:
    """Measure how sensitive each layer is to lost experts, for AdapMoE's routing=sensitivity.

    The text is what `--tasks` are trained on (never what they are tested on), or plain text files.
    Prints each layer's sensitivity and some thresholds.

    Args:
        out: the profile: NAME.safetensors
    """
    check_out(out)
    analyzed, data = analyzed_texts(given)
    del data["documents"]
    geometry = analyzed.geometry
    if geometry.top_k < 2:
        raise ValueError(
            f"pretrained={given['pretrained']!r} has one expert per token: none to leave out."
        )
    from lm_eval_moecache.model.moe_layers import router_digest
    from lm_eval_moecache.model.reading import Fisher

    fisher = Fisher(analyzed)
    fisher.read()
    arrays = {LAYERS: fisher.sensitivity, THRESHOLDS: fisher.thresholds()}
    made_from = data | {"tokens": fisher.num_tokens}
    routers = router_digest(analyzed.layers)
    artifact = artifact_of(SENSITIVITY, geometry, routers, made_from, arrays)
    write_artifact(out, artifact)
    layers: list[float] = arrays[LAYERS].tolist()
    thresholds: list[float] = arrays[THRESHOLDS].tolist()
    shares = {f"{share}%": thresholds[share] for share in (10, 25, 50)}
    summary = {"out": out, "tokens": fisher.num_tokens}
    lines = [f"{out}: sensitivity from {fisher.num_tokens} tokens, in nats per token:"]
    lines += [f"  layer {layer}: {value:.4g}" for layer, value in enumerate(layers)]
    lines += [f"  {share} of the activations below {value:.4g}" for share, value in shares.items()]
    found = {"sensitivity": layers, "thresholds": shares}
    return Report({**summary, **found}, "\n".join(lines))
