"""The hub that tasks' data come from: a hub that does not answer is found out at once."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from urllib.parse import urlsplit

from lm_eval_moecache.records.files import task_configs_dir

logger = logging.getLogger(__name__)
_PATIENCE_S = 3.0
_LIBRARIES = {
    "huggingface_hub.constants": ("HF_HUB_OFFLINE",),
    "datasets.config": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}
"""Module -> its switches, which it has read from the environment when it was imported."""


def answers(tasks: Sequence[str]) -> bool:
    """Whether the tasks' data can be fetched; True where all are shipped, which are not asked for.

    Where the hub does not answer, its libraries are set to use their caches alone: they would
    retry each file for half a minute.
    """
    shipped = {path.stem for path in (task_configs_dir() / "offline").glob("*.yaml")}
    if set(tasks) <= shipped:
        return True
    if _is_there():
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, switches in _LIBRARIES.items():
        for switch in switches if name in sys.modules else ():
            setattr(sys.modules[name], switch, True)
    return False


@cache
def _is_there() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True  # only the libraries know their way
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((str(hub.hostname), port), _PATIENCE_S).close()
    except OSError as error:
        logger.warning("%s does not answer (%s): only its cache is used.", hub.hostname, error)
        return False
    return True


@contextmanager
def naming_data_sets() -> Iterator[None]:
    """Turn a data set that cannot be fetched into a ValueError of one line."""
    try:
        yield
    except ConnectionError as error:
        if error.errno is not None:
            raise  # the system's own, as of a closed pipe; the hub's libraries give no number
        reason = str(error).split("\n")[0].rstrip(".")
        raise ValueError(
            f"tasks: {reason}. Without the hub: a cache that was filled elsewhere (HF_HOME), a "
            "current folder laid out like the hub (ORGANISATION/DATA_SET), or the shipped tasks "
            "tiny_gsm8k, tiny_mmlu, tiny_arc, tiny_truthfulqa, tiny_bbh and tiny_wikitext."
        ) from error
