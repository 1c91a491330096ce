"""Artifacts: data that algorithms learned offline, each in one safetensors file.

JSON metadata next to the arrays records their kind, the model they were made from and the data. An
algorithm that carries one exposes it as `artifact`; its file ships with the package for models that
have a folder in `artifacts/`. Use counts of experts have a file format of their own: the JSON of
`moecache profile use`, by which a cache is warmed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.files import check_file, parse_json, write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import shown

ARTIFACT_DIR = Path(__file__).resolve().parent.parent / "artifacts"
FORMAT_VERSION = 2
"""Version 2 added a checksum of the content."""
MOST_BYTES = 1 << 32
"""Largest artifact file that is read: a hundred times the predictor of a 100 B model."""
BUDDIES, PREDICTOR, SENSITIVITY = "buddies", "predictor", "sensitivity"
DATA_AWARE = "data_aware"
_METADATA_KEY = "moecache"
_PACKAGES = ("lm-eval-moecache", "torch", "transformers", "numpy", "safetensors")
_FIELDS = ("model", "num_layers", "num_experts", "top_k", "router_digest", "made_from", "versions")


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """One artifact of a kind (`buddies`, `predictor`) and the model it belongs to.

    `router_digest` identifies the model by the weights of its routers, whatever name it is loaded
    under. `made_from` records data, counts and settings: any JSON.
    """

    kind: str
    model: str
    num_layers: int
    num_experts: int
    top_k: int
    router_digest: str
    made_from: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]
    versions: Mapping[str, str] = field(default_factory=dict)
    """Library -> the version it was made with; `write_artifact` fills them in."""
    path: str = ""
    """The file it was read from, for messages."""

    def require(self, **shapes: tuple[int, ...]) -> None:
        """Raise ValueError unless these arrays exist, with these shapes and finite entries."""
        for name, shape in shapes.items():
            array = self.arrays.get(name)
            if array is None:
                raise ValueError(
                    f"{self.path}: the {self.kind} artifact lacks the array {name!r}; it has "
                    f"{', '.join(sorted(self.arrays)) or 'none'}."
                )
            if array.shape != shape:
                raise ValueError(
                    f"{self.path}: the array {name!r} has the shape {array.shape}, not {shape}."
                )
            if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
                raise ValueError(
                    f"{self.path}: the array {name!r} has entries that are not numbers."
                )


def artifact_of(
    kind: str,
    geometry: Geometry,
    router_digest: str,
    made_from: Mapping[str, Any],
    arrays: Mapping[str, npt.NDArray[Any]],
) -> Artifact:
    """Return an artifact of the model with this geometry and these routers."""
    sizes = {name: getattr(geometry, name) for name in ("num_layers", "num_experts", "top_k")}
    return Artifact(
        kind=kind,
        model=geometry.model,
        **sizes,
        router_digest=router_digest,
        made_from=made_from,
        arrays=arrays,
    )


def write_artifact(path: str | Path, artifact: Artifact) -> None:
    """Write the file atomically; the same artifact gives the same bytes."""
    from safetensors.numpy import save

    described = {name: getattr(artifact, name) for name in _FIELDS}
    described["versions"] = dict(artifact.versions) or versions_of(_PACKAGES)
    header = {"format": FORMAT_VERSION, "kind": artifact.kind, **described}
    arrays = {name: np.ascontiguousarray(artifact.arrays[name]) for name in sorted(artifact.arrays)}
    header["digest"] = content_digest(header, arrays)
    data = save(arrays, metadata={_METADATA_KEY: json.dumps(header, sort_keys=True)})
    write_whole(Path(path), data)


def content_digest(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the SHA-256 of an artifact's metadata and of its arrays with types and shapes."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def read_artifact(path: str | Path, kind: str, key: str) -> Artifact:
    """Read an artifact of this kind. ValueError names `key`, the option that gave the path."""
    from safetensors import SafetensorError, safe_open

    what = f"{key}={str(path)!r}"
    check_file(path, what, MOST_BYTES)
    try:
        with safe_open(path, "numpy") as file:
            header = _header((file.metadata() or {}).get(_METADATA_KEY), kind, what)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{what} is not a whole artifact file (truncated, or of another format): {error}."
        ) from error
    digest = header.pop("digest")
    if content_digest(header, arrays) != digest:
        raise ValueError(
            f"{what}: its content was changed after it was written: the checksum in its metadata "
            "differs. Copy or make the file again."
        )
    fields = {name: header[name] for name in _FIELDS}
    return Artifact(kind=kind, arrays=arrays, path=str(path), **fields)


def load_artifact(
    kind: str, path: str | None, geometry: Geometry, key: str, loss: str | None = None
) -> Artifact:
    """Return the artifact at `path`, or else the one (of this `loss`) that ships for this model.

    Raises ValueError where there is none, and where its layers, experts or top_k differ from the
    model's. Only the weights can show whether it is the same model: see `check_router_digest`.
    """
    name, option = (kind, "") if loss is None else (f"{kind}_{loss}", f" --loss {loss}")
    if path is None:
        # Compared with existing folders: a hub id may hold slashes, a path may hold anything.
        shipped = ARTIFACT_DIR.glob(f"*/{name}.safetensors")
        path = next((str(file) for file in shipped if file.parent.name == geometry.model), None)
    if path is None:
        raise ValueError(
            f"{key} must be given: no {name} artifact ships for pretrained={geometry.model!r}. "
            f"Make one with `moecache profile {kind} --pretrained {geometry.model}{option} --data "
            f"TEXT.txt --out {name}.safetensors` and name it here."
        )
    artifact = read_artifact(path, kind, key)
    for size in ("num_layers", "num_experts", "top_k"):
        made_for, expected = getattr(artifact, size), getattr(geometry, size)
        if made_for != expected:
            raise ValueError(
                f"{key}={str(path)!r} was made from {artifact.model!r} with {size}={made_for}, but "
                f"{geometry.model!r} has {size}={expected}. Make one for this model with `moecache "
                f"profile {kind}`."
            )
    return artifact


def check_router_digest(artifact: Artifact, digest: str, model: str) -> None:
    """Raise ValueError unless an artifact was made from the loaded model's router weights."""
    if artifact.router_digest != digest:
        raise ValueError(
            f"the {artifact.kind} artifact {artifact.path!r} was made from {artifact.model!r}, "
            f"whose router weights (digest {artifact.router_digest[:12]}) are not those of "
            f"{model!r} ({digest[:12]}). Make one for this model with `moecache profile "
            f"{artifact.kind}`."
        )


def _header(text: str | None, kind: str, what: str) -> dict[str, Any]:
    from lm_eval_moecache.records.schemas import check
    from lm_eval_moecache.records.schemas.artifacts import ArtifactHeader

    foreign = f"{what} is a safetensors file, but not an artifact of `moecache profile`"
    header = parse_json(text or "{}", f"{foreign}: its metadata")
    if not isinstance(header, dict) or "format" not in header:
        raise ValueError(f"{foreign}: it has no {_METADATA_KEY!r} metadata with a 'format'.")
    if header["format"] != FORMAT_VERSION:
        raise ValueError(
            f"{what} has format version {shown(header['format'])}; this release reads "
            f"{FORMAT_VERSION}. Make it again with `moecache profile {kind}`."
        )
    check(ArtifactHeader, header, f"{what}: its metadata")
    if header["kind"] != kind:
        raise ValueError(f"{what} holds an artifact of kind {header['kind']!r}; needed: {kind!r}.")
    return header


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return package -> version, `not installed` where it is missing."""
    versions = dict.fromkeys(packages, "not installed")
    for name in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
