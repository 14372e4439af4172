"""What a caller may pass as a group: a process group, its name, a `DeviceMesh`, or several of them, one per axis.

W ranks; along several axes the first is the slowest, as in a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

from meta_kernels.context_attention import group_of
from meta_kernels.contract import refusal

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = dist.ProcessGroup | DeviceMesh | str | Sequence[dist.ProcessGroup | DeviceMesh | str]


def names_of(op: str, group: Any) -> list[str]:
    """What an op's schema takes: the names of a group, of a mesh's groups, one per dimension, or of several groups.

    Raises:
        ValueError: it is none of these, or a group that this process is not in.
    """
    # By type: to a tracer a group is opaque, and asking what attributes it has is an error.
    if isinstance(group, str):
        return [group]
    if isinstance(group, (tuple, list)) and group:
        return [name for one in group for name in names_of(op, one)]
    if dist.is_available():
        if isinstance(group, dist.ProcessGroup):
            return [group.group_name]
        if isinstance(group, dist.device_mesh.DeviceMesh) and group.get_coordinate() is not None:
            return [group.get_group(dim).group_name for dim in range(group.ndim)]
    got = repr(group)
    if isinstance(group, (int, dist.device_mesh.DeviceMesh)):  # torch gives a number for a group of others
        got = "a group that this rank is not in"
    raise refusal(
        op, "group", "be a process group, its name, or a DeviceMesh", got, "pass torch.distributed.group.WORLD or another"
    )


def place_in(op: str, group: Any) -> tuple[int, int]:
    """(cp_size, cp_rank): how many ranks share a batch, and which of them this process is. Errors as `names_of`."""
    return _place(op, *names_of(op, group))


def _place(op: str, *names: str) -> tuple[int, int]:
    groups = [group_of(op, name) for name in names]
    rank = 0
    for one in groups:
        rank = rank * dist.get_world_size(one) + dist.get_rank(one)
    return math.prod(map(dist.get_world_size, groups)), rank


# A tracer does not look into groups: to it the place is a constant. This is all that `torch.compiler.assume_constant_result` does,
# but that would import the compiler together with this package.
vars(_place)["_dynamo_marked_constant"] = True
