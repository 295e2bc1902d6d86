"""Bad experts are named with their flag and the fix."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.models.config import ModelConfig
from megatron.models.moe.config import MoEConfig, layer_pattern
from tests.unit.models.helpers import TINY

GOOD = {"num_experts": 8, "ffn_hidden_size": 4, "pattern": (True, True)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 9}, "--moe-router-topk 9: choose between 1 and --num-experts 8"),
        ({"num_experts": 0}, "--num-experts 0: give 1 or more"),
        (
            {"num_groups": 3, "group_topk": 1},
            "--num-experts 8 is not a multiple of --moe-router-num-groups 3",
        ),
        ({"num_groups": 4}, "needs both"),
        ({"num_groups": 4, "group_topk": 5}, "--moe-router-group-topk 5: choose between 1 and"),
        ({"topk": 6, "num_groups": 4, "group_topk": 2}, "--moe-router-topk 6 is more than"),
        ({"topk": 3, "num_groups": 4, "group_topk": 2}, "--moe-router-topk 3 is not a multiple of"),
        ({"score_function": "tanh"}, "--moe-router-score-function tanh: choose one of softmax, sigmoid"),
        ({"load_balancing": ("aux_loss", "seq_aux_loss")}, "has 2 values: give --moe-aux-loss-coeff as many"),
        ({"load_balancing": ("sinkhorn",), "aux_loss_coeff": (0.1,)}, "sinkhorn stands alone"),
        ({"enable_expert_bias": True}, "needs --moe-router-score-function sigmoid"),
        ({"pad_expert_input_to_capacity": True}, "needs --moe-expert-capacity-factor: add it"),
        ({"expert_capacity_factor": -1.0}, "--moe-expert-capacity-factor -1.0: give a number > 0"),
        (
            {"expert_capacity_factor": 1.0, "token_drop_policy": "x"},
            "--moe-token-drop-policy x: choose one of probs",
        ),
        ({"expert_capacity_factor": 1.0, "dispatcher": "flex"}, "flex, which is dropless"),
        ({"shared_expert_gate": True}, "needs --moe-shared-expert-intermediate-size"),
        ({"apply_probs_on_input": True}, "needs --moe-router-topk 1"),
    ],
)
def test_bad_experts(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        MoEConfig(**{**GOOD, **changes})


def test_which_layers_have_experts():
    assert layer_pattern(1, 3) == (True, True, True)
    assert layer_pattern(2, 5) == (True, False, True, False, True)
    assert layer_pattern([0, 1, 1], 3) == (False, True, True)
    for frequency, message in ((0, "give 1 or more"), ([1], "describes 1 layers"), ([0, 0, 2], "give 0")):
        with pytest.raises(ValueError, match=message):
            layer_pattern(frequency, 3)


def test_further_layers_are_like_the_last():
    config = MoEConfig(8, 4, (False, True))
    assert [config.has_experts(index) for index in range(4)] == [False, True, True, True]


def test_from_arguments():
    arguments = SimpleNamespace(
        **TINY,
        num_experts=8,
        moe_layer_freq=[0, 1],
        moe_router_topk=3,
        moe_router_load_balancing_type=["seq_aux_loss", "aux_loss"],
        moe_aux_loss_coeff=[0.1, 0.2],
        moe_token_dispatcher_type="alltoall",
        ffn_hidden_size=20,
    )
    moe = ModelConfig.from_arguments(arguments).moe
    assert moe == MoEConfig(
        8,
        20,
        (False, True),
        topk=3,
        load_balancing=("seq_aux_loss", "aux_loss"),
        aux_loss_coeff=(0.1, 0.2),
        dispatcher="alltoall",
    )
    assert ModelConfig.from_arguments(SimpleNamespace(**TINY)).moe is None
