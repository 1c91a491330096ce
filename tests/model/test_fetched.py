"""What a layer tells the algorithms comes from a device in one transfer, whole numbers included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lm_eval_moecache.model.device import copy_to_host


class FromDevice(torch.Tensor):
    """A tensor that says it lies on a device, and counts what is brought from there."""

    brought = 0

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        type(self).brought += 1
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("valid", [None, [True, False, True]])
def test_one_transfer_brings_everything(valid: list[bool] | None) -> None:
    experts = torch.tensor([[[5, 16_777_215], [0, 1], [2, 3]]])
    weights, logits = torch.rand(3, 2), torch.rand(3, 7).to(torch.float16).float()
    tensors = [experts, weights, logits]
    marked = None if valid is None else np.array(valid)
    plain = copy_to_host(tensors, marked)
    FromDevice.brought = 0
    found = copy_to_host([t.as_subclass(FromDevice) for t in tensors], marked)
    assert FromDevice.brought == 1
    for ours, theirs in zip(found, plain, strict=True):
        assert np.array_equal(ours, theirs)
    assert found[0].astype(np.int64).tolist()[0] == [5, 16_777_215]


def test_one_transfer_brings_what_differs_in_rows() -> None:
    tensors = [torch.arange(8).reshape(4, 2), torch.rand(3, 5)]
    FromDevice.brought = 0
    found = copy_to_host([t.as_subclass(FromDevice) for t in tensors], None)
    assert FromDevice.brought == 1
    assert all(np.array_equal(f, t.numpy()) for f, t in zip(found, tensors, strict=True))
