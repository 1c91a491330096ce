"""Numbers of a layer, or a pass, brought to the host together (one wait for the device), and sent.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lm_eval_moecache.model.store import BoolArray


def fetched(tensors: Sequence[Tensor], valid: BoolArray | None) -> list[Any]:
    """Return each [..., n] tensor as an array [T, n], of the `valid` tokens where some are not.

    From a device in a single transfer, as float32, which holds whole numbers below 2^24 exactly:
    experts' numbers, too. In host memory they are looked at where they lie.
    """
    if all([values.is_cpu for values in tensors]):
        arrays = [_rows(values.detach().numpy()) for values in tensors]
    else:
        rows = [_rows(values.detach()) for values in tensors]
        packed = torch.cat([row.float().ravel() for row in rows]).cpu().numpy()
        arrays, start = [], 0
        for row in rows:
            arrays.append(packed[start : start + row.numel()].reshape(row.shape))
            start += row.numel()
    return arrays if valid is None else [array[valid] for array in arrays]


def sent(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return host numbers, an array or a tensor, on a device, without a wait for it.

    They are copied out of pageable memory before this returns, so they may go or change at once.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return tensor.to(device=device, dtype=dtype or tensor.dtype, non_blocking=True)


def _rows(values: Any) -> Any:
    return values if values.ndim == 2 else values.reshape(-1, values.shape[-1])
