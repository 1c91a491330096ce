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


EXPERTS = torch.tensor([[[5, 16_777_215], [0, 1], [2, 3]]])
LOGITS = torch.rand(3, 7).to(torch.float16).float()


@pytest.mark.parametrize(
    ("tensors", "valid"),
    [
        ([EXPERTS, torch.rand(3, 2), LOGITS], None),
        ([EXPERTS, torch.rand(3, 2), LOGITS], np.array([True, False, True])),
        # They may differ in rows.
        ([torch.arange(8).reshape(4, 2), torch.rand(3, 5)], None),
    ],
)
def test_one_transfer_brings_everything(tensors: list[torch.Tensor], valid: Any) -> None:
    plain = copy_to_host(tensors, valid)
    FromDevice.brought = 0
    found = copy_to_host([t.as_subclass(FromDevice) for t in tensors], valid)
    assert FromDevice.brought == 1
    for ours, theirs, given in zip(found, plain, tensors, strict=True):
        rows = given.reshape(-1, given.shape[-1]).numpy()
        assert np.array_equal(ours, theirs)
        assert np.array_equal(ours, rows if valid is None else rows[valid])
