"""megatron/tools/generate_text.py: sampling and the loop; loading a checkpoint is in tests/functional."""

from __future__ import annotations

import pytest
import torch

from megatron.tools.generate_text import Sampling, generate, main, next_token


def draws(logits: list[float], sampling: Sampling, count: int = 400) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = [next_token(torch.tensor(logits), sampling, generator) for _ in range(count)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


def test_temperature_zero_takes_the_most_likely() -> None:
    assert draws([0.0, 3.0, 2.9], Sampling(temperature=0))[1] == 1


def test_shares_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0]
    for temperature in (0.5, 2.0):
        expected = (torch.tensor(logits) / temperature).softmax(-1)
        torch.testing.assert_close(
            draws(logits, Sampling(temperature, top_p=1.0), 1000), expected, atol=0.06, rtol=0
        )


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert draws([0.0, 1.0, 2.0], Sampling(1.0, top_k=2, top_p=1.0))[0] == 0
    # probabilities 0.09, 0.24, 0.67: the first token reaches 0.6, the second is needed for 0.7
    assert draws([0.0, 1.0, 2.0], Sampling(1.0, top_p=0.6)).tolist() == [0.0, 0.0, 1.0]
    shares = draws([0.0, 1.0, 2.0], Sampling(1.0, top_p=0.7))
    assert shares[0] == 0 and shares[1] > 0


@pytest.mark.parametrize("values", [(-1.0, 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 0.0), (1.0, 0, 1.5)])
def test_bad_sampling_is_refused(values: tuple[float, int, float]) -> None:
    with pytest.raises(ValueError, match="--t"):
        Sampling(*values)


def counting_model(seen: list[list[int]]):
    """The next token is the last one + 1, modulo 10."""

    def logits_of(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens[0].tolist())
        return torch.nn.functional.one_hot((tokens + 1) % 10, 10).float() * 50

    return logits_of


def run_generate(num_tokens: int, stop: int | None = None, seen: list[list[int]] | None = None) -> list[int]:
    return generate(
        counting_model(seen if seen is not None else []),
        [1, 2],
        num_tokens,
        context=3,
        sampling=Sampling(),
        stop=stop,
    )


def test_continues_the_prompt_within_the_context() -> None:
    seen: list[list[int]] = []
    assert run_generate(4, seen=seen) == [3, 4, 5, 6]
    assert seen == [[1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_stops_at_the_end_of_the_document() -> None:
    assert run_generate(100, stop=6) == [3, 4, 5]


def test_without_checkpoint_one_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"generate_text: --load {tmp_path} holds no latest_checkpointed"
    )
