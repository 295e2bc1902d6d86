"""A CPU emulator of `transformer_engine_torch`, the compiled extension under Transformer Engine's PyTorch
modules.

The pure-Python wheel `transformer_engine` holds all of TE's layer code: autograd functions, tensor
parallelism, the main_grad contract. What it lacks on CPU is the extension with the kernels. `install()` puts
a small one, written in torch, in its place, so that tests run TE's own code and not somebody's idea of it.

Emulated: fp32, fp16 and bf16 GEMMs with cuBLASLt's rules on dtypes and shapes, grouped GEMMs, norms,
activations, softmaxes, multi-tensor Adam; FP8 with one scale a tensor (delayed and current scaling). Not
emulated, and refused by name (`NotEmulated`): other quantised formats (FP8 in blocks, MXFP8, FP4),
userbuffers, fused and flash attention, TE's context parallelism, float64.

What `install()` changes in the process: `sys.modules["transformer_engine_torch"]`, defaults of NVTE_
variables, and `torch.Tensor.is_cuda`, `.cuda`, `.to` as callers inside transformer_engine see them.
torch.cuda and torch's factory functions stay as they are for everyone else; TE's modules get their global
`torch` rebound to a proxy. So a process is either with the emulator or without, and tests that need it run in
a pool of their own (tests/te/engine.py).
"""

from tests.te.emulator.install import install
from tests.te.emulator.values import NotEmulated

__all__ = ["NotEmulated", "install"]
