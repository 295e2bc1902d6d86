"""Every layer is on exactly one stage, in order; what does not fit is an error that names the flags."""

from __future__ import annotations

import itertools

import pytest

from megatron.parallel.pipeline.actions import PipelineShape
from megatron.parallel.pipeline.stages import (
    StageLayers,
    StageRequest,
    describe_stages,
    parse_layout,
    place_layers,
)


@pytest.mark.parametrize("num_layers", [5, 7, 30, 80])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 16])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_no_layer_is_lost(num_layers: int, num_ranks: int, num_chunks: int) -> None:
    """P19: 30 layers on 4 ranks, 80 on 16 x 3 chunks, 5 on 2; or an error that names the sizes."""
    for embedding, loss in itertools.product((False, True), repeat=2):
        request = StageRequest(num_layers, embedding, loss)
        try:
            stages = place_layers(request, num_ranks, num_chunks)
        except ValueError as error:
            assert f"--num-layers {num_layers}" in str(error)
            assert num_layers < num_ranks * num_chunks
            continue
        assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
        assert [stage.embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
        assert [stage.loss for stage in stages] == [False] * (len(stages) - 1) + [True]
        counts = [
            len(stage.layers) + (embedding and stage.embedding) + (loss and stage.loss) for stage in stages
        ]
        assert max(counts) - min(counts) <= 1
        assert counts[-1] == min(counts), "the last stage has the loss as well"


def counts(stages: tuple[StageLayers, ...]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def test_where_the_remainder_goes() -> None:
    assert counts(place_layers(StageRequest(30), 4)) == [7, 8, 8, 7]
    assert counts(place_layers(StageRequest(5), 4)) == [1, 1, 2, 1]
    assert counts(place_layers(StageRequest(6, True, True), 4)) == [1, 2, 2, 1]


def test_counting_embedding_and_loss_makes_stages_of_only_them() -> None:
    """P20: the first stage is the embedding alone, the last one the loss alone."""
    stages = place_layers(StageRequest(2, True, True), 4)
    assert counts(stages) == [0, 1, 1, 0]
    assert str(stages[0]) == "embedding" and str(stages[3]) == "loss"


def test_first_and_last_rank_by_count() -> None:
    assert counts(place_layers(StageRequest(30, first_rank=6, last_rank=8), 4)) == [6, 8, 8, 8]
    assert counts(place_layers(StageRequest(12, first_rank=2, last_rank=4), 3, 2)) == [1, 3, 2, 1, 3, 2]
    assert counts(place_layers(StageRequest(5, first_rank=4, last_rank=1), 2)) == [4, 1]


@pytest.mark.parametrize(
    ("request_", "ranks", "chunks", "words"),
    [
        (StageRequest(5, first_rank=4, last_rank=3), 2, 1, "--decoder-first-pipeline-num-layers 4"),
        (StageRequest(8, first_rank=9), 4, 1, "--num-layers 8 does not fit"),
        (StageRequest(8, first_rank=3), 4, 2, "multiple of the 2 virtual stages"),
        (StageRequest(8, first_rank=8, last_rank=0), 4, 1, "stage 1 of 4 has nothing to do"),
        (StageRequest(3), 4, 2, "stage 1 of 8 has nothing to do"),
        (StageRequest(1, True, True), 4, 2, "too few for 8 pipeline stages"),
        (StageRequest(4, layout="Ett|tL"), 2, 1, "has 3 layers, --num-layers is 4"),
        (StageRequest(3, layout="Ett|t"), 2, 1, "one L, in the last"),
        (StageRequest(3, layout="tt|EtL"), 2, 1, "one E, in the first"),
        (StageRequest(3, layout="Ett|tLx"), 2, 1, "'x' means nothing"),
        (StageRequest(3, layout="Et|tEt|L"), 3, 1, "the order is E, t, m, L"),
        (StageRequest(3, layout="Et|t|tL"), 2, 1, "has 3 stages for 2 ranks"),
        (StageRequest(3, layout="Et||ttL"), 3, 1, "stage 1 of 3 has nothing to do"),
    ],
)
def test_what_does_not_fit_is_said(request_: StageRequest, ranks: int, chunks: int, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        place_layers(request_, ranks, chunks)
    assert words in str(caught.value)


def test_layouts_as_megatron_writes_them() -> None:
    assert counts(parse_layout("Et*3|(tt|)*29,m|L", 61)) == [3] + [2] * 29 + [0, 0]
    stages = parse_layout("E|t*2|(t|)*2L", 4)
    assert stages == (
        StageLayers(range(0), embedding=True),
        StageLayers(range(2)),
        StageLayers(range(2, 3)),
        StageLayers(range(3, 4)),
        StageLayers(range(4, 4), loss=True),
    )
    assert parse_layout("Et*3|(tt|)*29,m|L", 61)[30].num_mtp == 1


def test_description() -> None:
    stages = place_layers(StageRequest(5), 2, 2)
    assert describe_stages(stages, PipelineShape(2, 1, 2)) == [
        "rank 0: stage 0: embedding, layer 0; stage 2: layers 2-3",
        "rank 1: stage 1: layer 1; stage 3: layer 4, loss",
    ]
