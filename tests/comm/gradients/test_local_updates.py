"""What ranks that train apart may send."""

from __future__ import annotations

import pytest
import torch

from cpuft.comm.gradients.local_updates import LocalUpdates
from cpuft.errors import CpuftError


@pytest.mark.parametrize("compression", ["powersgd", "auto", "int9"])
def test_changes_of_parameters_have_types_of_their_own(compression: str) -> None:
    # Refused before any rank waits for another: there is no process group here.
    with pytest.raises(CpuftError, match=f"cannot be sent as {compression}: .*int8") as refused:
        LocalUpdates([torch.nn.Parameter(torch.zeros(1))], compression)
    assert "\n" not in str(refused.value)
