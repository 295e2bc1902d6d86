"""Packaging of megatron-nd.

`megatron` is a PEP 420 namespace package shared with megatron-core, so it has no __init__.py and
setuptools' find_packages() would find nothing: our packages are listed by walking our own folders.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
OURS = ("fsdp", "parallel", "models", "train", "tools")


def our_packages() -> list[str]:
    """Dotted names of every folder with an __init__.py under megatron/{OURS}."""
    inits = (path for name in OURS for path in (ROOT / "megatron" / name).rglob("__init__.py"))
    return sorted(".".join(path.parent.relative_to(ROOT).parts) for path in inits)


setup(
    name="megatron-nd",
    version="0.1.0",
    description="Pretraining of GPT and MoE models with an FSDP that replaces DDP, on CPUs and GPUs",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=our_packages(),
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.16.1",
        "numpy",
        "packaging",
        "rich",
        "sentencepiece",
        "tokenizers",
        "tiktoken",
        "tensorboard",
        "matplotlib",
        "pyyaml",
    ],
    extras_require={
        # transformer_engine's compiled part is chosen by the user's CUDA version.
        "te": ["transformer_engine[pytorch]>=2.6"],
        "hf": ["transformers>=4.51", "safetensors"],
        "wandb": ["wandb"],
        "dev": [
            "pytest>=8",
            "hypothesis",
            # what transformer_engine's Python part imports; itself it comes without dependencies (scripts/env.sh)
            "einops",
            "onnxscript",
            "pydantic",
            # what the checkpoint writers of megatron-core import; where it is missing they are waited for without end
            "psutil",
            # the linters
            "mypy",
            "pre-commit",
            "ruff",
            "types-PyYAML",
        ],
    },
)
