"""What a mixture-of-experts layer is: frozen, validated. Field names are Megatron's without their prefix ``moe_``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.parallel.expert.permute import DROP_POLICIES

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
DISPATCHERS = ("allgather", "alltoall", "flex")
ROUTER_DTYPES = (None, "fp32", "fp64")


@dataclass(frozen=True)
class MoEConfig:
    """The experts of a model.

    Attributes:
        num_experts: routed experts of a layer.
        ffn_hidden_size: inner channels of an expert.
        pattern: whether each layer has experts.
        topk: experts of a token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus" (the root of softplus) of the router's logits.
        pre_softmax: softmax over all experts before the choice, else over the chosen ones.
        num_groups, group_topk: a token's experts lie in at most group_topk of num_groups groups.
        topk_scaling_factor: multiplies the weights.
        router_dtype: the router's matrix product; None: the dtype of the hidden states. Scores are never narrower
            than fp32.
        enable_expert_bias, bias_update_rate: balancing without a loss (https://arxiv.org/abs/2408.15664).
        force_load_balancing: for measurements: random logits, so that all experts get as much.
        force_biased: for measurements: a normal bias of this standard deviation on each expert's logits, alike on all
            ranks; new in each forward, or with a negative number drawn once.
        load_balancing: kinds, and aux_loss_coeff: a weight of each.
        z_loss_coeff: of the router's z-loss (https://arxiv.org/abs/2202.08906); None: off.
        input_jitter_eps: in training, the router's input is multiplied by uniform numbers in 1 -+ this.
        expert_capacity_factor: an expert takes at most its even share times this; None: dropless.
        pad_expert_input_to_capacity, token_drop_policy: of that.
        shared_expert_intermediate_size: inner channels of the shared expert; None: there is none.
        shared_expert_gate: its output is multiplied by sigmoid of a learned projection.
        shared_expert_overlap: it computes while tokens travel to the routed experts.
        apply_probs_on_input: weigh an expert's input, not its output; with topk 1 only.
        dispatcher: "allgather", "alltoall" or "flex"; flex_backend: of the last.
    """

    num_experts: int
    ffn_hidden_size: int
    pattern: tuple[bool, ...]
    topk: int = 2
    score_function: str = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    topk_scaling_factor: float | None = None
    router_dtype: str | None = None
    enable_expert_bias: bool = False
    bias_update_rate: float = 1e-3
    force_load_balancing: bool = False
    force_biased: float | None = None
    load_balancing: tuple[str, ...] = ("aux_loss",)
    aux_loss_coeff: tuple[float, ...] = (0.0,)
    z_loss_coeff: float | None = None
    input_jitter_eps: float | None = None
    expert_capacity_factor: float | None = None
    pad_expert_input_to_capacity: bool = False
    token_drop_policy: str = "probs"
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    shared_expert_overlap: bool = False
    apply_probs_on_input: bool = False
    dispatcher: str = "allgather"
    flex_backend: str = "deepep"

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ValueError(f"--num-experts {self.num_experts}: give 1 or more")
        if self.ffn_hidden_size < 1:
            raise ValueError(f"--moe-ffn-hidden-size {self.ffn_hidden_size}: give 1 or more")
        if not 1 <= self.topk <= self.num_experts:
            raise ValueError(
                f"--moe-router-topk {self.topk}: choose between 1 and --num-experts {self.num_experts}"
            )
        for flag, value, allowed in (
            ("--moe-router-score-function", self.score_function, SCORE_FUNCTIONS),
            ("--moe-token-dispatcher-type", self.dispatcher, DISPATCHERS),
            ("--moe-token-drop-policy", self.token_drop_policy, DROP_POLICIES),
            ("--moe-router-dtype", self.router_dtype, ROUTER_DTYPES),
            *(("--moe-router-load-balancing-type", kind, BALANCING) for kind in self.load_balancing),
        ):
            if value not in allowed:
                raise ValueError(f"{flag} {value}: choose one of {', '.join(map(str, allowed))}")
        self._check_numbers()
        self._check_groups()
        self._check_balancing()
        self._check_capacity()
        if self.apply_probs_on_input and self.topk != 1:
            raise ValueError(f"--moe-apply-probs-on-input needs --moe-router-topk 1, not {self.topk}")
        if self.shared_expert_gate and self.shared_expert_intermediate_size is None:
            raise ValueError("--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size: give it")

    def _check_numbers(self) -> None:
        for flag, value, right, range_ in (
            *(("--moe-aux-loss-coeff", weight, weight >= 0, "0 or more") for weight in self.aux_loss_coeff),
            ("--moe-z-loss-coeff", self.z_loss_coeff, (self.z_loss_coeff or 0) >= 0, "0 or more"),
            (
                "--moe-input-jitter-eps",
                self.input_jitter_eps,
                0 <= (self.input_jitter_eps or 0) < 1,
                "a number from 0 to below 1",
            ),
            (
                "--moe-router-topk-scaling-factor",
                self.topk_scaling_factor,
                self.topk_scaling_factor is None or self.topk_scaling_factor > 0,
                "a number above 0",
            ),
            ("--moe-router-bias-update-rate", self.bias_update_rate, self.bias_update_rate >= 0, "0 or more"),
            (
                "--moe-shared-expert-intermediate-size",
                self.shared_expert_intermediate_size,
                self.shared_expert_intermediate_size is None or self.shared_expert_intermediate_size >= 1,
                "1 or more",
            ),
        ):
            if not right:
                raise ValueError(f"{flag} {value}: give {range_}")

    def _check_groups(self) -> None:
        groups, chosen = self.num_groups, self.group_topk
        if (groups is None) != (chosen is None):
            raise ValueError(
                f"--moe-router-num-groups {groups} and --moe-router-group-topk {chosen}: "
                "group-limited routing needs both"
            )
        if groups is None or chosen is None:
            return
        if groups < 1 or self.num_experts % groups:
            raise ValueError(
                f"--num-experts {self.num_experts} is not a multiple of --moe-router-num-groups {groups}"
            )
        if not 1 <= chosen <= groups:
            raise ValueError(
                f"--moe-router-group-topk {chosen}: choose between 1 and --moe-router-num-groups {groups}"
            )
        size = self.num_experts // groups
        if self.topk > chosen * size:
            raise ValueError(
                f"--moe-router-topk {self.topk} is more than --moe-router-group-topk {chosen} groups of "
                f"{size} experts hold: lower it"
            )
        if self.topk % chosen or self.topk // chosen > size:
            raise ValueError(
                f"--moe-router-topk {self.topk} is not a multiple of --moe-router-group-topk {chosen} (a group's "
                f"score is the sum of its best topk / group_topk experts), or asks for more than {size} a group"
            )

    def _check_balancing(self) -> None:
        if len(self.load_balancing) != len(self.aux_loss_coeff):
            raise ValueError(
                f"--moe-router-load-balancing-type has {len(self.load_balancing)} values: give "
                f"--moe-aux-loss-coeff as many, not {len(self.aux_loss_coeff)}"
            )
        if len(set(self.load_balancing)) != len(self.load_balancing):
            raise ValueError(
                f"--moe-router-load-balancing-type {' '.join(self.load_balancing)}: name each once"
            )
        if self.sinkhorn and (len(self.load_balancing) > 1 or any(self.aux_loss_coeff)):
            raise ValueError(
                "--moe-router-load-balancing-type sinkhorn stands alone: drop --moe-aux-loss-coeff"
            )
        if self.sinkhorn and (self.num_groups or self.enable_expert_bias):
            raise ValueError(
                "--moe-router-load-balancing-type sinkhorn chooses by itself: drop --moe-router-num-groups and "
                "--moe-router-enable-expert-bias"
            )
        if self.enable_expert_bias and self.score_function == "softmax":
            raise ValueError(
                "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid: add it"
            )

    def _check_capacity(self) -> None:
        factor = self.expert_capacity_factor
        if factor is None:
            if self.pad_expert_input_to_capacity:
                raise ValueError(
                    "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor: add it"
                )
        elif factor <= 0:
            raise ValueError(f"--moe-expert-capacity-factor {factor}: give a number > 0, or leave it out")
        elif self.dispatcher == "flex":
            raise ValueError(
                f"--moe-expert-capacity-factor {factor} with --moe-token-dispatcher-type flex, which is dropless: "
                "use alltoall"
            )

    @property
    def sinkhorn(self) -> bool:
        """Whether sinkhorn chooses the experts."""
        return "sinkhorn" in self.load_balancing

    @property
    def losses(self) -> dict[str, float]:
        """The balancing losses that are there, with their weights."""
        pairs = zip(self.load_balancing, self.aux_loss_coeff, strict=True)
        return {kind: weight for kind, weight in pairs if kind in LOSSES and weight}

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Every auxiliary loss of a layer, as it is logged."""
        names = tuple(LOG_NAMES[kind] for kind in self.losses)
        return (*names, "z_loss") if self.z_loss_coeff else names

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return sum(self.pattern)

    def has_experts(self, layer_index: int) -> bool:
        """Whether the layer with this global index has experts; layers after the last are like the last."""
        return self.pattern[min(layer_index, len(self.pattern) - 1)]

    @classmethod
    def from_arguments(
        cls, arguments: Any, num_layers: int, dense_ffn_hidden_size: int | None
    ) -> MoEConfig | None:
        """The experts that a namespace with Megatron's argument names describes; None without them."""
        experts = getattr(arguments, "num_experts", None)
        if experts is None:
            return None
        given: dict[str, Any] = {field: getattr(arguments, name, None) for field, name in ARGUMENTS.items()}
        given = {field: value for field, value in given.items() if value is not None}
        given.setdefault("ffn_hidden_size", dense_ffn_hidden_size)
        for field in ("load_balancing", "aux_loss_coeff"):
            if field in given and not isinstance(given[field], list | tuple):
                given[field] = (given[field],)
            given[field] = tuple(given.get(field, cls.__dataclass_fields__[field].default))
        given["pattern"] = layer_pattern(getattr(arguments, "moe_layer_freq", 1), num_layers)
        return cls(**given)


ARGUMENTS = {
    "num_experts": "num_experts",
    "ffn_hidden_size": "moe_ffn_hidden_size",
    "topk": "moe_router_topk",
    "score_function": "moe_router_score_function",
    "pre_softmax": "moe_router_pre_softmax",
    "num_groups": "moe_router_num_groups",
    "group_topk": "moe_router_group_topk",
    "topk_scaling_factor": "moe_router_topk_scaling_factor",
    "router_dtype": "moe_router_dtype",
    "enable_expert_bias": "moe_router_enable_expert_bias",
    "bias_update_rate": "moe_router_bias_update_rate",
    "force_load_balancing": "moe_router_force_load_balancing",
    "force_biased": "moe_router_force_biased",
    "load_balancing": "moe_router_load_balancing_type",
    "aux_loss_coeff": "moe_aux_loss_coeff",
    "z_loss_coeff": "moe_z_loss_coeff",
    "input_jitter_eps": "moe_input_jitter_eps",
    "expert_capacity_factor": "moe_expert_capacity_factor",
    "pad_expert_input_to_capacity": "moe_pad_expert_input_to_capacity",
    "token_drop_policy": "moe_token_drop_policy",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "shared_expert_gate": "moe_shared_expert_gate",
    "shared_expert_overlap": "moe_shared_expert_overlap",
    "apply_probs_on_input": "moe_apply_probs_on_input",
    "dispatcher": "moe_token_dispatcher_type",
    "flex_backend": "moe_flex_dispatcher_backend",
}
"""Field -> destination of its flag."""

LOG_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Megatron's names in logs."""


def layer_pattern(frequency: int | list[int] | tuple[int, ...], num_layers: int) -> tuple[bool, ...]:
    """``--moe-layer-freq``: every n-th layer from the first, or one 0 or 1 for each layer.

    Raises ValueError for a list of another length or with other values.
    """
    if isinstance(frequency, int):
        if frequency < 1:
            raise ValueError(f"--moe-layer-freq {frequency}: give 1 or more, or a list of 0 and 1")
        return tuple(index % frequency == 0 for index in range(num_layers))
    if len(frequency) != num_layers:
        raise ValueError(
            f"--moe-layer-freq describes {len(frequency)} layers, but --num-layers is {num_layers}: make them equal"
        )
    if any(item not in (0, 1) for item in frequency) or not any(frequency):
        raise ValueError(
            f"--moe-layer-freq {list(frequency)}: give 0 (dense) or 1 (experts) for each layer, one at least"
        )
    return tuple(bool(item) for item in frequency)
