"""Lets a trained model write.

    python -m megatron.tools.generate_text --load runs/quickstart/checkpoints --prompt "ROMEO:" --num-tokens 120

Model and tokenizer are those that the checkpoint was saved with; any number of ranks may have saved it. Every
token costs a forward pass over the whole context (there is no key-value cache): meant for a look at a model,
not for serving one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.train.config import TrainConfig

# One rank holds all: whatever cut the model while it was trained.
_ONE_RANK = {
    "world_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "num_distributed_optimizer_instances": 1,
    "sequence_parallel": False,
    "sharding_strategy": "no_shard",
    "outer_sharding_strategy": "no_shard",
    "gradient_accumulation_fusion": False,
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    temperature: divides the logits; 0 takes the most likely token. top_k: only the k most likely tokens, 0 is
    off. top_p: only the most likely tokens that together reach this probability, 1 is off
    (https://arxiv.org/abs/1904.09751). seed: of the draws.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"--temperature {self.temperature} is negative: give 0 or more")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} is negative: give 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} is not within (0, 1]: give 1 to turn it off")


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token from logits [vocabulary]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        smallest = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, order[before >= sampling.top_p], float("-inf"))
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    num_tokens: int,
    *,
    context: int,
    sampling: Sampling,
    stop: int | None = None,
) -> list[int]:
    """Return up to `num_tokens` ids that continue `prompt`.

    Args:
        logits_of: tokens [1, s] -> logits [1, s, vocabulary].
        prompt: at least one id.
        context: longest s; older tokens fall out.
        stop: id that ends the text, and is left out.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = logits_of(torch.tensor([ids[-context:]]))
        token = next_token(logits[0, -1].cpu(), sampling, generator)
        if token == stop:
            break
        ids.append(token)
    return ids[len(prompt) :]


def single_rank_config(load: str | Path, iteration: int) -> TrainConfig:
    """The configuration that a checkpoint was saved with, for one rank.

    Raises:
        ValueError: nothing to load at `load`.
    """
    from megatron.train.arguments.resolve import default_device
    from megatron.train.checkpoint import read_record

    device = default_device()
    arguments = {
        **dict(read_record(load, iteration).arguments),
        **_ONE_RANK,
        "device": device,
        "distributed_backend": "nccl" if device == "cuda" else "gloo",
    }
    return TrainConfig(arguments)


def load_model(
    load: str | Path, config: TrainConfig, iteration: int, vocab_size: int
) -> tuple[torch.nn.Module, torch.device]:
    """Build the model of `config` on this one rank and fill it from a checkpoint; dropout off."""
    from megatron.fsdp import checkpoint as fsdp_checkpoint
    from megatron.models.gpt import GPTModel
    from megatron.train.arguments.model import model_config_from
    from megatron.train.build import build_backend, build_mesh, wrap_model
    from megatron.train.checkpoint import load_tensors
    from megatron.train.initialize import Launch, ProcessGroupOptions, initialize_distributed
    from megatron.train.resume import model_tensors

    device = initialize_distributed(Launch(), ProcessGroupOptions(config.distributed_backend, config.device))
    mesh = build_mesh(config, device)
    backend = build_backend(config, mesh, None)
    model = GPTModel(model_config_from(config, vocab_size), backend, mesh)
    wrapped = wrap_model(model, config, mesh, device)
    load_tensors(load, iteration, model_tensors(wrapped))
    fsdp_checkpoint.mark_loaded(wrapped)
    wrapped.eval()
    return wrapped, device


def run(args: argparse.Namespace) -> str:
    """Return prompt and continuation.

    Raises:
        ValueError: wrong flags, or a checkpoint that cannot be loaded.
    """
    from megatron.tools.loading import whole_checkpoint
    from megatron.train.tokenizers import build_tokenizer

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if args.num_tokens < 1:
        raise ValueError(f"--num-tokens {args.num_tokens}: give 1 or more")
    root, iteration = whole_checkpoint(args.load, args.ckpt_step)
    config = single_rank_config(root, iteration)
    tokenizer = build_tokenizer(config)
    prompt = tokenizer.tokenize(args.prompt) or [tokenizer.eod]
    model, device = load_model(root, config, iteration, tokenizer.vocab_size)

    @torch.no_grad()
    def logits_of(tokens: Tensor) -> Tensor:
        return model(tokens=tokens.to(device))[..., : tokenizer.vocab_size]

    ids = generate(
        logits_of,
        prompt,
        args.num_tokens,
        context=min(config.max_position_embeddings, config.seq_length),
        sampling=sampling,
        stop=tokenizer.eod,
    )
    return tokenizer.detokenize(prompt + ids)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 after one line on what is wrong."""
    from megatron.train.errors import is_users
    from megatron.train.initialize import quiet_libraries

    args = _parser().parse_args(argv)
    quiet_libraries()
    try:
        text = run(args)
    except ValueError as error:
        if not is_users(error):
            raise
        print(f"generate_text: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="generate_text", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--load", required=True, help="the --save folder of a run, or one iter_* folder in it")
    add("--ckpt-step", type=int, help="iteration of the checkpoint (default: the newest whole one)")
    add("--prompt", default="", help="text to continue (default: the beginning of a document)")
    add("--num-tokens", type=int, default=120, help="tokens to add (default: 120)")
    add("--temperature", type=float, default=0.8, help="0 takes the most likely token (default: 0.8)")
    add("--top-k", type=int, default=0, help="draw from the k most likely tokens only (default: off)")
    add("--top-p", type=float, default=0.95, help="draw from the most likely tokens that make up p (0.95)")
    add("--seed", type=int, default=1234)
    return parser


if __name__ == "__main__":
    sys.exit(main())
