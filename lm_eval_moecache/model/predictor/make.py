"""Makes a predictor: records, trains layer after layer, judges. What is done stays done.

The working folder holds recordings and trained layers under a digest of what they depend on, so
that an interrupted run goes on and another loss uses the same recordings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from tqdm import tqdm

from lm_eval_moecache.model.checkpoint import model_path
from lm_eval_moecache.model.device import best_device
from lm_eval_moecache.model.moe_layers import MoELayer, describe, find_moe_layers, router_digest
from lm_eval_moecache.model.predictor.accuracy import certainty_rows, judge, layer_rows
from lm_eval_moecache.model.predictor.network import PredictorNetwork, Recipe, train
from lm_eval_moecache.model.predictor.samples import Samples, digest_prompts, record
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.artifact import PREDICTOR, Artifact, write_artifact
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.predictor import array_name, num_stages

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A trained predictor and what was found on the held-out prompts."""

    artifact: Artifact
    layers: Rows
    certainty: Rows

    def write(self, path: str, data: Mapping[str, Any]) -> None:
        """Write the artifact with its accuracy, and with where its prompts come from."""
        made_from = {**data, **self.artifact.made_from}
        made_from |= {"layers": self.layers, "certainty": self.certainty}
        write_artifact(path, dataclasses.replace(self.artifact, made_from=made_from))


@dataclass(frozen=True, slots=True)
class _Model:
    """A loaded model, and what of it a predictor belongs to."""

    model: Any
    tokenizer: Any
    layers: list[MoELayer]
    geometry: Geometry
    router_digest: str


def make(
    pretrained: str,
    prompts: Sequence[str],
    work: Path,
    *,
    num_tokens: int,
    prompts_per_batch: int,
    recipe: Recipe,
) -> Made:
    """Make the predictor of a model; the same arguments give the same bytes, resumed or not."""
    loaded = _load(pretrained)
    settings = {
        "routers": loaded.router_digest,
        "prompts": digest_prompts(prompts),
        "tokens": num_tokens,
        "prompts_per_batch": prompts_per_batch,
    }
    shards = record(
        loaded.model,
        loaded.tokenizer,
        loaded.layers,
        prompts,
        work / f"recorded-{_digest(settings)}",
        num_tokens=num_tokens,
        batch_size=prompts_per_batch,
    )
    samples = Samples(shards)
    known, held_out = samples.split(recipe.seed)
    folder = work / f"trained-{_digest(settings | dataclasses.asdict(recipe))}"
    arrays, rows = _train(samples, known, held_out, loaded.geometry, recipe, folder)
    counts = {
        "tokens": num_tokens,
        "prompts": len(prompts),
        "held_out_prompts": len(held_out),
        "samples": len(samples.prompts),
    }
    artifact = _describe(loaded, arrays, {**dataclasses.asdict(recipe), **counts})
    return _judge(artifact, samples, loaded.layers, known, held_out, rows)


def _load(pretrained: str) -> _Model:
    path = model_path(pretrained)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval().to(best_device())
    layers = find_moe_layers(model)
    geometry = describe(model, layers, pretrained)
    return _Model(model, tokenizer, layers, geometry, router_digest(layers))


def _describe(loaded: _Model, arrays: Mapping[str, Any], made_from: Mapping[str, Any]) -> Artifact:
    geometry = loaded.geometry
    return Artifact(
        kind=PREDICTOR,
        model=geometry.model,
        num_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        router_digest=loaded.router_digest,
        made_from=made_from,
        arrays=arrays,
    )


def _judge(
    artifact: Artifact,
    samples: Samples,
    layers: Sequence[MoELayer],
    known: IntArray,
    held_out: IntArray,
    rows: Rows,
) -> Made:
    network, top_k = PredictorNetwork(artifact), artifact.top_k
    judged = judge(samples, network, layers, num_chosen=top_k, known=known, held_out=held_out)
    found = [{**row, **how} for row, how in zip(layer_rows(judged, top_k), rows, strict=True)]
    return Made(artifact=artifact, layers=found, certainty=certainty_rows(judged, top_k))


def _train(
    samples: Samples,
    known: IntArray,
    held_out: IntArray,
    geometry: Geometry,
    recipe: Recipe,
    folder: Path,
) -> tuple[dict[str, Any], Rows]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    rows: Rows = []
    for layer in tqdm(range(geometry.num_layers), desc="training", unit="layer"):
        path = folder / f"{layer:03d}.safetensors"
        if not path.is_file():
            _train_layer(samples, known, held_out, geometry, recipe, layer, path)
        found, row = _read_layer(path)
        arrays |= found
        rows.append(row)
    return arrays, rows


def _train_layer(
    samples: Samples,
    known: IntArray,
    held_out: IntArray,
    geometry: Geometry,
    recipe: Recipe,
    layer: int,
    path: Path,
) -> None:
    from safetensors.numpy import save

    pairs = samples.pairs(layer, geometry.num_layers)
    kept = pairs.where(np.isin(pairs.prompts_N, known))
    judged = pairs.where(np.isin(pairs.prompts_N, held_out))
    for name, part in (("training", kept), ("held-out", judged)):
        if not len(part.prompts_N):
            raise ValueError(
                f"prompts: none of the {name} ones gives a sample for layer {layer}. Give more "
                "prompts, or such as are answered at length."
            )
    found = train(
        kept,
        judged,
        stages=num_stages(layer, geometry.num_layers),
        num_chosen=geometry.top_k,
        recipe=recipe,
        layer=layer,
    )
    arrays = {
        array_name(layer, stage, what): array
        for stage, linear in enumerate(found.stages)
        for what, array in zip(("weight", "bias"), linear, strict=True)
    }
    row = {"epochs": found.epochs, "best_epoch": found.best_epoch, "loss": found.held_out_loss}
    partial = path.with_suffix(".partial")
    partial.write_bytes(save(arrays, metadata={"row": json.dumps(row)}))
    partial.replace(path)


def _read_layer(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return arrays, json.loads(file.metadata()["row"])


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
