"""Any layout to any layout: every element of weights, buffers and optimizer state is the right one after each change.

Each family goes round a ring of layouts; every hop loads what the layout before it saved, is checked number by number,
and saves again. The file itself is checked without any layout: its keys and shapes are those of one rank, every element
is there once (K04: the bytes are those of the model). Covers I04, K04, K05, K17, F14.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.train.checkpoint import paper_ranks
from tests.unit.train.checkpoint.paper_ranks import PaperRank

GATED = "--swiglu --ffn-hidden-size 24 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 8 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall"
)
MLA = (
    "--multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    "--qk-layernorm --untie-embeddings-and-output-weights"
)
FAMILIES = {
    "tied, learned positions": "",
    "untied, gated, query groups": f"{GATED} --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 2",
    "tied, experts": f"{GATED} {EXPERTS}",
    "latent attention, experts, two predictions": f"{GATED} {MLA} {EXPERTS} --moe-layer-freq ([0]*1+[1]*3) "
    "--moe-shared-expert-intermediate-size 8 --mtp-num-layers 1",
    "tied, prediction of a second token": f"{GATED} --mtp-num-layers 1",
}
TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
STRATEGY = "--data-parallel-sharding-strategy"
VPP = "--num-layers-per-virtual-pipeline-stage 1"
ONE = (1, f"{STRATEGY} no_shard")
DENSE = [
    ONE,
    (3, f"{STRATEGY} optim_grads_params"),
    (4, f"{TP} 2 {STRATEGY} optim_grads_params"),
    (4, f"{PP} 2 {VPP} {STRATEGY} optim"),
    (4, f"{TP} 2 --context-parallel-size 2 --sequence-parallel {STRATEGY} optim_grads"),
    (4, f"--num-distributed-optimizer-instances 2 {STRATEGY} optim_grads_params"),
    (8, f"{TP} 2 {PP} 2 {STRATEGY} optim_grads_params"),
    (4, f"{TP} 4 {STRATEGY} no_shard"),
]
MIXTURE = [
    ONE,
    (2, f"--expert-model-parallel-size 2 {STRATEGY} optim_grads_params"),
    (4, f"{TP} 2 --sequence-parallel --expert-model-parallel-size 2 {STRATEGY} optim"),
    (4, f"{PP} 2 {VPP} {STRATEGY} optim_grads_params"),
    (4, f"--expert-model-parallel-size 4 {STRATEGY} no_shard"),
    (4, f"{TP} 2 --sequence-parallel --expert-tensor-parallel-size 2 {STRATEGY} optim_grads"),
    (
        8,
        f"{PP} 2 --expert-model-parallel-size 2 --num-distributed-optimizer-instances 2 {STRATEGY} optim_grads_params",
    ),
    (3, f"{STRATEGY} optim_grads_params"),
]
# No virtual stages with a prediction of a second token: its layer is a stage's of its own.
RINGS = {name: MIXTURE if "experts" in name else DENSE for name in FAMILIES}


def layouts_of(family: str) -> list[tuple[int, str]]:
    ring = RINGS[family]
    if "prediction" in family:
        ring = [(world, words.replace(f" {VPP}", "")) for world, words in ring]
    return [*ring, ONE]


def go_round(root: Path, family: str, layouts: list[tuple[int, str]]) -> int:
    """Number of changes of layout."""
    words = FAMILIES[family]
    ranks: list[PaperRank] = paper_ranks.build_ranks(ONE[0], f"{words} {ONE[1]}")
    names = paper_ranks.whole_shapes(ranks)
    assert len(names) > 60
    paper_ranks.fill(ranks)
    for iteration, (world, layout) in enumerate(layouts, start=1):
        if iteration > 1:
            ranks = paper_ranks.build_ranks(world, f"{words} {layout}")
            paper_ranks.load(root, iteration - 1, ranks)
        paper_ranks.check(ranks)
        paper_ranks.save(root, iteration, ranks)
        paper_ranks.check_file(root, iteration, names)
    return len(layouts) - 1


def test_there_are_more_than_thirty_changes() -> None:
    assert sum(len(layouts_of(family)) - 1 for family in FAMILIES) >= 40


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_changes_of_layout(tmp_path: Path, family: str) -> None:
    """Tensor and pipeline parallelism with virtual stages, experts over ranks, three data-parallel ranks."""
    layouts = [*layouts_of(family)[:4], ONE]
    assert go_round(tmp_path, family, layouts) == 4


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_all_changes_of_layout(tmp_path: Path, family: str) -> None:
    layouts = layouts_of(family)
    assert go_round(tmp_path, family, layouts) == len(layouts) - 1


def test_a_wrong_number_is_found(tmp_path: Path) -> None:
    """Otherwise the tests above prove nothing."""
    ranks = paper_ranks.build_ranks(2, f"{TP} 2")
    paper_ranks.fill(ranks)
    paper_ranks.local(ranks[1].tensors["model.decoder.layers.3.mlp.linear_fc1.weight"])[-1, -1] += 1
    with pytest.raises(AssertionError, match=r"rank 1: model\.decoder\.layers\.3\.mlp\.linear_fc1\.weight"):
        paper_ranks.check(ranks)
    paper_ranks.save(tmp_path, 1, ranks)
    one = paper_ranks.build_ranks(*ONE)
    paper_ranks.load(tmp_path, 1, one)
    with pytest.raises(AssertionError, match=r"model\.decoder\.layers\.3\.mlp\.linear_fc1\.weight"):
        paper_ranks.check(one)
