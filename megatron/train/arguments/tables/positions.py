"""Flags: position embeddings."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused, works
from megatron.train.arguments.values import layer_pattern

DEEPSEEK, YARN_TEST = "models/deepseek.py", "models/test_deepseek.py"

TITLE = "Position embeddings"

FLAGS: tuple[Flag, ...] = (
    works(
        "--position-embedding-type",
        str,
        "learned_absolute",
        "learned_absolute, rope, yarn (rope that YaRN stretches) or none.",
        "models/config.py",
        choices=(
            "learned_absolute",
            "rope",
            "yarn",
            "mrope",
            "relative",
            "none",
        ),
        refused_values=(
            ("mrope", "multimodal rotary positions are not part of text pretraining"),
            ("relative", "relative attention biases (T5) are not part of GPT"),
        ),
        test="models/test_config.py",
    ),
    works(
        "--use-rotary-position-embeddings",
        Switch.ON,
        False,
        "The older spelling of --position-embedding-type rope.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
    ),
    works(
        "--no-position-embedding",
        Switch.OFF,
        True,
        "The older spelling of --position-embedding-type rope or none: no learned table.",
        "train/arguments/resolve.py",
        test="train/test_arguments_rules.py",
        dest="add_position_embedding",
    ),
    works(
        "--rotary-base",
        int,
        10000,
        "Base of the rotary frequencies.",
        "models/rotary.py",
        test="models/test_config.py",
    ),
    works(
        "--rotary-percent",
        float,
        1.0,
        "Part of each head that is rotated.",
        "models/rotary.py",
        test="models/test_config.py",
    ),
    works(
        "--rotary-interleaved",
        Switch.ON,
        False,
        "Rotate neighbouring pairs instead of halves.",
        "models/rotary.py",
        test="models/test_gpt.py",
    ),
    works(
        "--rotary-seq-len-interpolation-factor",
        int,
        None,
        "Positions are divided by this.",
        "models/rotary.py",
        test="models/test_config.py",
    ),
    works(
        "--use-rope-scaling",
        Switch.ON,
        False,
        "Llama 3.1's scaling of rotary frequencies.",
        "models/rotary.py",
        test="models/test_config.py",
    ),
    works(
        "--rope-scaling-factor",
        float,
        8.0,
        "Factor of --use-rope-scaling.",
        "models/rotary.py",
        test="models/test_config.py",
    ),
    works("--rotary-scaling-factor", float, 1.0, "How far YaRN stretches.", DEEPSEEK, test=YARN_TEST),
    works(
        "--rope-type",
        str,
        None,
        "Rotary positions as they are, or stretched by YaRN, which --multi-latent-attention takes by itself.",
        DEEPSEEK,
        test=YARN_TEST,
        choices=(
            "rope",
            "yarn",
        ),
    ),
    works("--mscale", float, 1.0, "Of YaRN's cosines and sines.", DEEPSEEK, test=YARN_TEST),
    works(
        "--mscale-all-dim",
        float,
        0.0,
        "Of the temperature of attention under YaRN.",
        DEEPSEEK,
        test=YARN_TEST,
    ),
    works(
        "--yarn-beta-fast",
        float,
        None,
        "YaRN keeps what turns more often than this (default 32).",
        DEEPSEEK,
        test=YARN_TEST,
    ),
    works(
        "--yarn-beta-slow",
        float,
        None,
        "YaRN divides what turns less often than this (default 1).",
        DEEPSEEK,
        test=YARN_TEST,
    ),
    works(
        "--yarn-correction-range-round-to-int",
        Switch.ON,
        None,
        "Whole channels between the two betas (default).",
        DEEPSEEK,
        test=YARN_TEST,
    ),
    works(
        "--no-yarn-correction-range-round-to-int",
        Switch.OFF,
        True,
        "Fractions of channels between the two betas.",
        DEEPSEEK,
        dest="yarn_correction_range_round_to_int",
        test="models/test_deepseek.py",
    ),
    works(
        "--yarn-original-max-position-embeddings",
        int,
        None,
        "Length before YaRN's stretching (default 4096).",
        DEEPSEEK,
        test=YARN_TEST,
    ),
    works(
        "--no-rope-freq",
        layer_pattern,
        None,
        "Every n-th layer has no rotary positions, or a list of those without.",
        "models/variants.py",
        test="models/test_gpt.py",
    ),
    refused(
        "--mrope-section",
        int,
        None,
        "multimodal rotary positions are not part of text pretraining",
        nargs="+",
    ),
    refused(
        "--relative-attention-max-distance", int, 128, "relative attention biases (T5) are not part of GPT"
    ),
    refused(
        "--relative-attention-num-buckets", int, 32, "relative attention biases (T5) are not part of GPT"
    ),
    no_op(
        "--no-rope-fusion",
        Switch.OFF,
        True,
        "the rotation is not a fused kernel here",
        dest="apply_rope_fusion",
    ),
)
