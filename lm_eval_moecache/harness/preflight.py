"""Everything that can be wrong with a run's arguments, found before any weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.harness.arguments import ROUTING, Config, read_config, split_arguments
from lm_eval_moecache.harness.device import resolve_device
from lm_eval_moecache.harness.host_checks import check_host, check_kernels
from lm_eval_moecache.harness.loaded import check_loaded, model_name
from lm_eval_moecache.harness.refusal import refusing
from lm_eval_moecache.model.checkpoint import model_path, skeleton
from lm_eval_moecache.model.moe_layers import MoELayer, describe, find_moe_layers
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.wall.assemble import LOADS_OTHERWISE, check_wall
from lm_eval_moecache.model.weighting.find import check_rules
from lm_eval_moecache.model.weights import check_weights
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import parse_capacity

Bare = Callable[[Any, Mapping[str, Any]], Any]
"""(what `pretrained=` is, the host's arguments) -> the model without weights."""


def preflight(
    pretrained: str | nn.Module,
    arguments: Mapping[str, Any],
    host_keys: Iterable[str],
    speculative: bool = False,
    bare: Bare = skeleton,
) -> tuple[Config, dict[str, Any]]:
    """Return our checked setting and the host's arguments, with the device they resolve to.

    Raises ValueError for unknown or useless keys, for values outside what is allowed (of HFLM's
    arguments, too), for a model without MoE layers that can be taken over, for a capacity too small
    for one expert, for parameters out of an algorithm's range, and for weights that are not whole
    (`check_weights`).
    """
    ours, theirs = split_arguments(arguments, host_keys)
    theirs["device"] = resolve_device(theirs)
    if isinstance(pretrained, nn.Module):
        theirs["device"] = str(pretrained.device)
    config = read_config(ours, speculative)
    check_host(pretrained, config, theirs)
    if isinstance(pretrained, nn.Module):
        check_loaded(pretrained, config, theirs)
    model = bare(pretrained, theirs)
    check_kernels(model, theirs)
    layers = find_moe_layers(model)
    _check_precision(config, theirs)
    geometry = describe(model, layers, model_name(pretrained), config.ladder)
    capacity = parse_capacity(config.capacity, geometry)
    if config.warm is not None:
        config.warm.check(geometry)
    if config.clock == "wall":
        check_wall(model, geometry, capacity, theirs, config.store)
    _check_algorithms(config, geometry, layers)
    if isinstance(pretrained, str):
        check_weights("pretrained", model_path(pretrained), theirs)
    return config, theirs


def _check_algorithms(config: Config, geometry: Geometry, layers: Sequence[MoELayer]) -> None:
    """Refuse parameters out of range, and what the model's routers cannot do for a policy."""
    # Built to be thrown away: their constructors check the parameters' ranges.
    built = {axis: getattr(config.policy, axis).build(geometry, config.seed) for axis in AXES}
    asks_gates = built["routing"].depth or built["prefetch"].depth or _records_gates(config)
    if built["prefetch"].needs_draft or (asks_gates and not built["prefetch"].uses_predictor):
        _check_routers_can_be_asked(layers)
    if not (built["routing"].is_lossless and built["miss"].is_lossless):
        check_rules([layer.gate for layer in layers])


def geometry_of(pretrained: str) -> Geometry:
    """Return the sizes of a model, from its configuration alone."""
    with refusing(pretrained):
        model = skeleton(pretrained, {})
    return describe(model, find_moe_layers(model), model_name(pretrained))


def _check_precision(config: Config, theirs: Mapping[str, Any]) -> None:
    """Refuse codecs that this device or a library's version cannot do, and other quantisers."""
    if config.ladder is None:
        return
    for key in LOADS_OTHERWISE:
        if theirs.get(key):
            raise ValueError(
                f"{key}={theirs[key]!r} does not go with precision={config.precision!r}, which "
                "encodes and places the experts itself. Allowed: one of the two."
            )
    codecs_of(config.ladder, str(theirs["device"]).partition(":")[0])


def _records_gates(config: Config) -> bool:
    """Whether a trace is recorded that keeps what the gates of later layers say."""
    return config.trace is not None and config.trace_keep != ROUTING


def _check_routers_can_be_asked(layers: Sequence[MoELayer]) -> None:
    """Refuse gate predictions where a router's decision needs more than can be had ahead."""
    for gate in (layer.gate for layer in layers):
        if gate.missing:
            raise ValueError(
                f"prefetch, routing, trace: the router {gate.name} needs "
                f"{', '.join(gate.missing)} beside the hidden states, so a later layer's gate "
                "cannot be asked ahead of time. Allowed for this model: prefetch=none, and no "
                "trace or trace_keep=routing."
            )
