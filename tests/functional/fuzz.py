"""Random legal configurations against one rank: the soak behind scripts/fuzz_layouts.py.

A seed is one configuration: a small model, data and optimizer, and a layout for them. What validate() refuses is drawn
again from the same stream, so that a seed stays one configuration; a refusal must be a ValueError with one line.
Everything computes in float64, where results of different layouts agree to TOLERANCES; only Transformer Engine, which
has no float64, runs in fp32.
"""

from __future__ import annotations

import functools
import random
import shlex
from dataclasses import dataclass, field

from tests.functional import golden, runs
from tests.functional.cases import LAYOUT_FLAGS, Launch
from tests.functional.features import STRATEGIES, Flags, words
from tests.functional.golden import Metrics

TOLERANCES = {"fp64": 1e-8, "fp32": 3e-5}
"""Relative, of losses and, ten times as much, of gradient norms."""
MOST_DRAWS = 200
STEPS = 2
TIMEOUT = 240.0
METRICS = ("lm loss", "grad-norm")
HOOK = "tests.functional.hooks:transformer_engine_on_cpu"
MORE_LAYOUT_FLAGS = frozenset(
    """--decoder-first-pipeline-num-layers --recompute-modules --overlap-grad-reduce --overlap-param-gather
    --torch-fsdp2-no-reshard-after-forward --account-for-loss-in-pipeline-split
    --account-for-embedding-in-pipeline-split""".split()
)


@dataclass
class Drawn:
    """A legal configuration and what was drawn before it."""

    seed: int
    launch: Launch
    plain: Launch
    refusals: list[str] = field(default_factory=list)

    @property
    def on_te(self) -> bool:
        return "transformer_engine" in self.launch.words

    @property
    def precision(self) -> str:
        return "fp64" if "--fp64" in self.launch.words else "fp32"


def draw(seed: int, max_ranks: int) -> Drawn:
    """The configuration of a seed. RuntimeError if nothing legal comes up, or a refusal is no ValueError's one line."""
    rng = random.Random(seed)
    refusals = []
    for _ in range(MOST_DRAWS):
        flags = _model(rng)
        ranks = _layout(rng, flags, max_ranks)
        script = str(flags.pop("script"))
        launch = Launch(script, ranks, tuple(words(flags)))
        kept = {k: v for k, v in flags.items() if k not in LAYOUT_FLAGS | MORE_LAYOUT_FLAGS}
        plain = Launch(script, 1, tuple(words({**kept, "--transformer-impl": "local"})))
        reason = _refusal(launch) or _refusal(plain)
        if reason is None:
            return Drawn(seed, launch, plain, refusals)
        refusals.append(reason)
    raise RuntimeError(f"seed {seed}: nothing legal in {MOST_DRAWS} draws; the last refusal: {refusals[-1]}")


def _refusal(launch: Launch) -> str | None:
    from megatron.train.arguments import parse_args, validate

    try:
        validate(parse_args(runs.command_line(launch)), launch.ranks, "cpu")
    except ValueError as error:
        text = str(error)
        if "--" not in text or "\n" in text:
            raise RuntimeError(f"a refusal that names no flag in one line: {text!r}") from error
        return text
    return None


def _model(rng: random.Random) -> Flags:
    kind = rng.choice(("gpt", "llama", "llama", "mixtral", "qwen", "deepseek"))
    chance = lambda share: rng.random() < share
    flags: Flags = {"script": "pretrain_gpt.py" if kind in ("gpt", "llama") else "pretrain_deepseek.py"}
    preset = {"mixtral": "mixtral-tiny", "qwen": "qwen3-moe-tiny", "deepseek": "deepseek-v3-tiny"}.get(kind)
    if preset:
        flags |= {"--preset": preset, "--moe-router-dtype": "fp64"}
        flags["--moe-layer-freq"] = rng.choice((1, 2))
    if kind == "qwen":
        # The preset's global loss looks at the step so far on all data-parallel ranks: it depends on their number.
        flags["--moe-router-load-balancing-type"] = rng.choice(("aux_loss", "seq_aux_loss"))
    layers = rng.choice((2, 3, 4, 4, 5))
    flags |= {
        "--num-layers": layers,
        "--hidden-size": 32,
        "--num-attention-heads": 4,
        "--ffn-hidden-size": 48,
    }
    if kind == "deepseek":
        flags |= {
            "--q-lora-rank": 16, "--kv-lora-rank": 16, "--qk-head-dim": 8, "--qk-pos-emb-head-dim": 4,
            "--v-head-dim": 8, "--moe-ffn-hidden-size": 16, "--moe-shared-expert-intermediate-size": 16,
            "--mtp-num-layers": rng.choice((1, 2)), "--yarn-original-max-position-embeddings": 8,
        }  # fmt: skip
    else:
        flags |= {"--group-query-attention": True, "--num-query-groups": rng.choice((1, 2, 4))}
    if kind in ("gpt", "llama"):
        optional = {
            "--qk-layernorm": 0.3, "--untie-embeddings-and-output-weights": 0.5, "--disable-bias-linear": 0.3,
            "--apply-layernorm-1p": 0.2, "--add-qkv-bias": 0.3,
        }  # fmt: skip
        flags |= {flag: True for flag, share in optional.items() if chance(share)}
    if kind == "llama":
        flags |= {"--swiglu": True, "--normalization": "RMSNorm", "--position-embedding-type": "rope"}
    flags |= _run(rng)
    return flags


def _run(rng: random.Random) -> Flags:
    chance = lambda share: rng.random() < share
    flags: Flags = {
        "--seq-length": 16, "--max-position-embeddings": 16, "--attention-dropout": 0, "--hidden-dropout": 0,
        "--init-method-std": 0.1, "--micro-batch-size": rng.choice((1, 1, 2)),
        "--global-batch-size": rng.choice((4, 8)), "--train-iters": STEPS, "--lr": 0.003,
        "--lr-decay-style": "constant", "--clip-grad": rng.choice((1.0, 0.0)), "--mock-data": True,
        "--tokenizer-type": "NullTokenizer", "--vocab-size": rng.choice((61, 62)), "--null-tokenizer-eod-id": 7,
        "--make-vocab-size-divisible-by": 8, "--num-workers": 0, "--eval-iters": 0, "--log-interval": 1,
        "--seed": rng.randrange(1000), "--optimizer": rng.choice(("adam", "adam", "sgd")),
    }  # fmt: skip
    optional = {"--eod-mask-loss": 0.7, "--calculate-per-token-loss": 0.4}
    flags |= {flag: True for flag, share in optional.items() if chance(share)}
    if chance(0.3):
        flags |= {"--reset-attention-mask": True, "--reset-position-ids": True}
    return flags


def _layout(rng: random.Random, flags: Flags, max_ranks: int) -> int:
    """Add a layout to `flags`; returns its ranks."""
    chance = lambda share: rng.random() < share
    tp, pp, cp = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 4))
    dp = rng.choice((1, 2, 2, 3, 4))
    while tp * pp * cp * dp > max_ranks or tp * pp * cp * dp == 1:
        tp, pp, cp = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 4))
        dp = rng.choice((1, 2, 2, 3, 4))
    if dp == 3:
        flags["--global-batch-size"] = 12
    flags |= {
        "--use-megatron-fsdp": True,
        "--data-parallel-sharding-strategy": rng.choice(list(STRATEGIES.values())),
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--context-parallel-size": cp,
    }
    if tp > 1 and chance(0.6):
        flags["--sequence-parallel"] = True
    if cp > 1:
        flags["--cp-comm-type"] = rng.choice(("p2p", "a2a", "all_gather"))
    if pp > 1:
        _pipeline(rng, flags, int(str(flags["--num-layers"])), pp)
    if dp % 2 == 0 and chance(0.3):
        flags["--num-distributed-optimizer-instances"] = 2
        if chance(0.5):
            flags["--outer-dp-sharding-strategy"] = "optim"
    if "--preset" in flags:
        flags |= {
            "--expert-model-parallel-size": rng.choice((1, 2, 2, 4)),
            "--expert-tensor-parallel-size": rng.choice((1, 1, 2)),
            "--moe-token-dispatcher-type": rng.choice(("alltoall", "allgather")),
        }
    optional = {
        "--no-gradient-accumulation-fusion": 0.4,
        "--overlap-grad-reduce": 0.3,
        "--overlap-param-gather": 0.3,
        "--torch-fsdp2-no-reshard-after-forward": 0.2,
    }
    flags |= {flag: True for flag, share in optional.items() if chance(share)}
    _recompute(rng, flags)
    if chance(0.15) and "--reset-attention-mask" not in flags:
        flags |= {
            "--transformer-impl": "transformer_engine",
            "--attention-backend": "local" if cp > 1 else "unfused",
        }
        flags.pop("--moe-router-dtype", None)
    else:
        flags |= {"--transformer-impl": "local", "--fp64": True}
    return tp * pp * cp * dp


def _pipeline(rng: random.Random, flags: Flags, layers: int, pp: int) -> None:
    kind = rng.choice(("gpipe", "1f1b", "interleaved", "zero-bubble", "first"))
    if kind in ("gpipe", "1f1b"):
        flags["--pipeline-schedule"] = kind
    elif kind == "interleaved":
        flags["--num-virtual-stages-per-pipeline-rank"] = 2
    elif kind == "zero-bubble":
        flags["--delay-wgrad-compute"] = True
    elif layers > pp:
        flags["--decoder-first-pipeline-num-layers"] = 1
    if rng.random() < 0.2 and kind != "first":
        flags["--account-for-loss-in-pipeline-split"] = True


def _recompute(rng: random.Random, flags: Flags) -> None:
    kind = rng.choice(("none", "none", "selective", "uniform", "block"))
    if kind == "selective":
        flags["--recompute-granularity"] = "selective"
        if rng.random() < 0.5:
            flags["--recompute-modules"] = [rng.choice(("core_attn", "mlp"))]
    elif kind != "none":
        flags |= {
            "--recompute-granularity": "full",
            "--recompute-method": kind,
            "--recompute-num-layers": rng.choice((1, 2)),
        }


@functools.cache
def plain_metrics(launch: Launch) -> Metrics:
    """The numbers of a one-rank run; each is made once."""
    return golden.select(runs.in_pool(launch), METRICS)


def failure(drawn: Drawn) -> str | None:
    """Run a configuration and its one-rank run; what differs, or what went wrong, or None."""
    try:
        expected = plain_metrics(drawn.plain)
        found = golden.select(
            runs.in_pool(drawn.launch, HOOK if drawn.on_te else "", timeout=TIMEOUT), METRICS
        )
    except Exception as error:  # a crash of a rank is a finding like any other
        return f"{type(error).__name__}: {str(error).strip()[-1800:]}"
    tolerance = TOLERANCES[drawn.precision]
    faults = [
        str(fault)
        for fault in golden.compare(expected, found, None)
        if not fault.relative <= tolerance * (golden.NORM_FACTOR if fault.metric == "grad-norm" else 1.0)
    ]
    return "; ".join(faults[:4]) or None


def repeat_command(seed: int, max_ranks: int) -> str:
    """What repeats one configuration."""
    return f"scripts/fuzz_layouts.py --seed {seed} --count 1 --max-ranks {max_ranks}"


def report(drawn: Drawn, text: str, max_ranks: int) -> str:
    """A failure: what differs, the configuration, and the command that repeats it."""
    launch = drawn.launch
    return (
        f"seed {drawn.seed} FAILED: {text}\n  {launch.ranks} ranks: {launch.script} {shlex.join(launch.words)}\n"
        f"  repeat: {repeat_command(drawn.seed, max_ranks)}"
    )
