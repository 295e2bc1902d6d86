"""Options of NCCL's communicators by group: priorities of their streams, and what a YAML file gives for each.

Groups are named as Megatron names them in --nccl-communicator-config-path and --high-priority-stream-groups; a name
may stand for several of our axes. On other backends options have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Megatron's names -> axes of megatron.parallel.layout.AXES whose communicators they are.
AXES_OF = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "ep": ("ep",),
    "dp": ("dp", "fsdp", "dp_cp"),
    "dp_cp": ("fsdp", "dp_cp"),
    "intra_dp_cp": ("fsdp",),
    "inter_dp_cp": ("dp_outer",),
    "ep_dp": ("edp", "edp_shard"),
    "intra_ep_dp": ("edp_shard",),
    "inter_ep_dp": ("edp_outer",),
    "ep_tp": ("etp",),
}
# Fields of ncclConfig_t that torch passes on, and their types.
FIELDS = {
    "cga_cluster_size": int,
    "max_ctas": int,
    "min_ctas": int,
    "net_name": str,
    "split_share": int,
    "traffic_class": int,
    "blocking": int,
    "comm_name": str,
}


@dataclass(frozen=True)
class CommunicatorOptions:
    """Of one group. fields: of ncclConfig_t."""

    high_priority: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, options: Any) -> Any:
        """Set them on a torch.distributed.ProcessGroupNCCL.Options and return it."""
        options.is_high_priority_stream = self.high_priority
        for name, value in self.fields.items():
            setattr(options.config, name, value)
        return options


def communicator_options(
    groups: Mapping[str, Mapping[str, Any]], high_priority: Sequence[str] = ()
) -> dict[str, CommunicatorOptions]:
    """Options by axis.

    groups: what the file gives: group -> field of ncclConfig_t -> value; "is_high_priority_stream" too.
    high_priority: groups whose streams go first.

    Raises ValueError for a group or field that does not exist, or a value of another type.
    """
    for name in (*groups, *high_priority):
        if name not in AXES_OF:
            raise ValueError(f"there is no communicator group {name!r}; there are {', '.join(AXES_OF)}")
    result: dict[str, CommunicatorOptions] = {}
    # The general name (dp) before the particular one (intra_dp_cp), which then wins.
    for name in sorted({*groups, *high_priority}, key=lambda name: -len(AXES_OF[name])):
        given = dict(groups.get(name) or {})
        first = name in high_priority or bool(given.pop("is_high_priority_stream", False))
        for field_name, value in given.items():
            wanted = FIELDS.get(field_name)
            if wanted is None:
                raise ValueError(f"group {name} has no option {field_name!r}; there are {', '.join(FIELDS)}")
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ValueError(f"{field_name} of group {name} is {value!r}; give a {wanted.__name__}")
        for axis in AXES_OF[name]:
            before = result.get(axis, CommunicatorOptions())
            result[axis] = CommunicatorOptions(first or before.high_priority, {**before.fields, **given})
    return result
