"""The features that functional cases combine, which pairs cannot meet and why, and the flags of a combination. PURE.

A cell is one value of every axis. `RULES` name pairs of values that cannot be in one run; everything else that fits
on MAX_RANKS ranks can. A cell's flags are words of a command line, so that cases are what a user types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Cell = Mapping[str, str]
Flags = dict[str, object]

AXES: dict[str, tuple[str, ...]] = {
    "model": ("gpt", "mixtral", "deepseek"),
    "backend": ("torch", "te"),
    "precision": ("fp32", "bf16"),
    "zero": ("zero0", "zero1", "zero2", "zero3"),
    "outer": ("flat", "hsdp", "hfsdp"),
    "tensor": ("tp1", "tp2", "tp2-sp"),
    "pipeline": ("pp1", "gpipe", "1f1b", "interleaved", "zero-bubble"),
    "context": ("cp1", "p2p", "a2a", "all_gather"),
    "experts": ("dense", "ep1", "ep2", "etp2", "ep2-etp2"),
    "dispatcher": ("no-dispatcher", "alltoall", "allgather"),
    "wgrad": ("fused", "unfused"),
    "loss": ("mean", "per-token"),
    "recompute": ("keep", "selective", "full"),
    "type": ("regular", "ckpt-resume", "reshard-resume"),
}
DEFAULTS = {axis: values[0] for axis, values in AXES.items()}
MAX_RANKS = 8
STEPS = {"regular": 3, "ckpt-resume": 4, "reshard-resume": 4}
GLOBAL_BATCH = 8

STRATEGIES = {
    "zero0": "no_shard",
    "zero1": "optim",
    "zero2": "optim_grads",
    "zero3": "optim_grads_params",
}


@dataclass(frozen=True)
class Rule:
    """Values of two axes that cannot meet, and why."""

    first: tuple[str, tuple[str, ...]]
    second: tuple[str, tuple[str, ...]]
    reason: str

    def forbids(self, cell: Cell) -> bool:
        """Whether a (partial) cell holds such a pair."""
        return cell.get(self.first[0]) in self.first[1] and cell.get(self.second[0]) in self.second[1]


WITH_EXPERTS = ("ep1", "ep2", "etp2", "ep2-etp2")
RULES = (
    Rule(("model", ("gpt",)), ("experts", WITH_EXPERTS), "a GPT has no experts"),
    Rule(("model", ("mixtral", "deepseek")), ("experts", ("dense",)), "the model has experts"),
    Rule(("model", ("gpt",)), ("dispatcher", ("alltoall", "allgather")), "a GPT has no experts"),
    Rule(("model", ("mixtral", "deepseek")), ("dispatcher", ("no-dispatcher",)), "the model has experts"),
    Rule(("experts", ("dense",)), ("dispatcher", ("alltoall", "allgather")), "nothing to dispatch"),
    Rule(("experts", WITH_EXPERTS), ("dispatcher", ("no-dispatcher",)), "experts need a dispatcher"),
    Rule(
        ("outer", ("hsdp", "hfsdp")), ("zero", ("zero0",)), "refused: hybrid sharding of what is not sharded"
    ),
    Rule(
        ("outer", ("hfsdp",)),
        ("zero", ("zero1", "zero2")),
        "refused: an outer axis of optimizer shards needs ZeRO-3 inside",
    ),
)


@dataclass(frozen=True)
class Sizes:
    """Ranks on each axis."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    outer: int

    @classmethod
    def of(cls, cell: Cell) -> Sizes:
        """Of a cell, or the least of a partial one."""
        value = lambda axis: cell.get(axis, DEFAULTS[axis])
        experts = value("experts")
        return cls(
            tp=1 if value("tensor") == "tp1" else 2,
            pp=1 if value("pipeline") == "pp1" else 2,
            cp={"cp1": 1, "a2a+p2p": 4}.get(value("context"), 2),
            ep=2 if "ep2" in experts.split("-") else 1,
            etp=2 if "etp2" in experts.split("-") else 1,
            outer=1 if value("outer") == "flat" else 2,
        )

    @property
    def dp(self) -> int | None:
        """The least data-parallel size at which FSDP has something to share; None beyond MAX_RANKS."""
        for dp in (1, 2, 4, 8):
            world = self.tp * self.pp * self.cp * dp
            grid = self.ep * self.etp
            shards = dp * self.cp // self.outer
            fits = dp % self.outer == 0 and world // self.pp % (grid * self.outer) == 0
            if world <= MAX_RANKS and fits and shards >= 2:
                return dp
        return None

    @property
    def world(self) -> int:
        """Ranks of the run."""
        assert self.dp is not None, f"{self} does not fit on {MAX_RANKS} ranks"
        return self.tp * self.pp * self.cp * self.dp


def possible(cell: Cell) -> bool:
    """Whether a (partial) cell breaks no rule and fits."""
    if Sizes.of(cell).dp is None or any(rule.forbids(cell) for rule in RULES):
        return False
    # Refused: Transformer Engine delays weight gradients of experts only where they are fused.
    delayed = (cell.get("backend"), cell.get("pipeline"), cell.get("wgrad")) == (
        "te",
        "zero-bubble",
        "unfused",
    )
    return not (delayed and cell.get("experts", "dense") != "dense")


MODEL_FLAGS: dict[str, Flags] = {
    "gpt": {
        "--num-layers": 4,
        "--hidden-size": 32,
        "--num-attention-heads": 4,
        "--group-query-attention": True,
        "--num-query-groups": 2,
        "--init-method-std": 0.1,
    },
    "mixtral": {
        "--preset": "mixtral-tiny",
        "--hidden-size": 32,
        "--ffn-hidden-size": 48,
        "--init-method-std": 0.1,
    },
    "deepseek": {
        "--preset": "deepseek-v3-tiny",
        "--hidden-size": 32,
        "--ffn-hidden-size": 48,
        "--q-lora-rank": 16,
        "--kv-lora-rank": 16,
        "--qk-head-dim": 8,
        "--qk-pos-emb-head-dim": 4,
        "--v-head-dim": 8,
        "--yarn-original-max-position-embeddings": 8,
        "--moe-ffn-hidden-size": 16,
        "--moe-shared-expert-intermediate-size": 16,
        "--init-method-std": 0.1,
    },
}
SCRIPTS = {"gpt": "pretrain_gpt.py", "mixtral": "pretrain_deepseek.py", "deepseek": "pretrain_deepseek.py"}
# Documents end within samples (eod 7), so that samples differ in their number of valid tokens.
RUN_FLAGS: Flags = {
    "--seq-length": 16,
    "--max-position-embeddings": 16,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
    "--micro-batch-size": 1,
    "--global-batch-size": GLOBAL_BATCH,
    "--lr": 0.003,
    "--lr-decay-style": "constant",
    "--weight-decay": 0.1,
    "--clip-grad": 1.0,
    "--mock-data": True,
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": 62,
    "--null-tokenizer-eod-id": 7,
    "--eod-mask-loss": True,
    "--make-vocab-size-divisible-by": 8,
    "--num-workers": 0,
    "--eval-iters": 0,
    "--log-interval": 1,
    "--log-num-zeros-in-grad": True,
    "--deterministic-mode": True,
    "--seed": 7,
}
_PIPELINES: dict[str, Flags] = {
    "pp1": {},
    "gpipe": {"--pipeline-schedule": "gpipe"},
    "1f1b": {"--pipeline-schedule": "1f1b"},
    "interleaved": {"--num-virtual-stages-per-pipeline-rank": 2},
    "zero-bubble": {"--delay-wgrad-compute": True},
}
_RECOMPUTE: dict[str, Flags] = {
    "keep": {},
    "selective": {"--recompute-granularity": "selective"},
    "full": {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": 1,
    },
}


def layout_flags(cell: Cell) -> Flags:
    """What places the model on ranks and chooses implementations; none of it may change a result."""
    sizes = Sizes.of(cell)
    flags: Flags = {
        "--use-megatron-fsdp": True,
        "--data-parallel-sharding-strategy": STRATEGIES[cell["zero"]],
    }
    if sizes.tp > 1:
        flags["--tensor-model-parallel-size"] = sizes.tp
    if cell["tensor"] == "tp2-sp":
        flags["--sequence-parallel"] = True
    if sizes.pp > 1:
        flags["--pipeline-model-parallel-size"] = sizes.pp
    flags |= _PIPELINES[cell["pipeline"]]
    if sizes.cp > 1:
        flags |= {"--context-parallel-size": sizes.cp, "--cp-comm-type": cell["context"]}
    if cell["context"] == "a2a+p2p":
        flags["--hierarchical-context-parallel-sizes"] = [2, 2]
    if cell["experts"] != "dense":
        flags |= {
            "--expert-model-parallel-size": sizes.ep,
            "--expert-tensor-parallel-size": sizes.etp,
            "--moe-token-dispatcher-type": cell["dispatcher"],
        }
    if sizes.outer > 1:
        flags["--num-distributed-optimizer-instances"] = sizes.outer
    if cell["outer"] == "hfsdp":
        flags["--outer-dp-sharding-strategy"] = "optim"
    if cell["wgrad"] == "unfused":
        flags["--no-gradient-accumulation-fusion"] = True
    if cell["backend"] == "te":
        flags["--transformer-impl"] = "transformer_engine"
        flags["--attention-backend"] = "local" if sizes.cp > 1 else "unfused"
    else:
        flags["--transformer-impl"] = "local"
    return flags | _RECOMPUTE[cell["recompute"]]


def run_flags(cell: Cell) -> Flags:
    """All flags of a cell's run."""
    flags = {**MODEL_FLAGS[cell["model"]], **RUN_FLAGS, "--train-iters": STEPS[cell["type"]]}
    if cell["precision"] == "bf16":
        flags |= {"--bf16": True, "--megatron-fsdp-main-params-dtype": "fp32"}
    if cell["loss"] == "per-token":
        flags["--calculate-per-token-loss"] = True
    return flags | layout_flags(cell)


def resharded(cell: Cell) -> Cell:
    """Another layout of two ranks, in which a checkpoint of `cell` is continued."""
    plain = {
        **DEFAULTS,
        **{axis: cell[axis] for axis in ("model", "precision", "loss", "type", "dispatcher")},
    }
    plain["experts"] = "dense" if cell["experts"] == "dense" else "ep2" if cell["experts"] == "ep1" else "ep1"
    plain["zero"] = {"zero0": "zero3", "zero1": "zero2", "zero2": "zero0", "zero3": "zero1"}[cell["zero"]]
    return plain


def words(flags: Flags) -> list[str]:
    """Flags as words of a command line; True is a bare flag."""
    found: list[str] = []
    for flag, value in flags.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        found += [flag, *map(str, values)]
    return found
