"""Enumerations, classes and constants of the extension, and the refusal of what is not emulated."""

from __future__ import annotations

import enum
from typing import Any, NoReturn

import torch


class NotEmulated(NotImplementedError):
    """The emulator met something that only the compiled Transformer Engine can do; the message names it."""


def refuse(what: str) -> NoReturn:
    """Raise NotEmulated for `what`."""
    raise NotEmulated(f"{what} is not emulated: it needs the compiled Transformer Engine on a GPU")


def refuse_quantizer(quantizer: Any, where: str) -> None:
    """Every kernel may be asked for a quantised output; none here can make one."""
    if quantizer is not None:
        refuse(f"{where} with {type(quantizer).__name__}")


class DType(enum.IntEnum):
    """The extension's dtypes, with its numbers (TE's Python code keeps a copy of them)."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH_DTYPE = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
}


def torch_dtype(dtype: Any) -> torch.dtype | None:
    """The torch dtype of a dtype as TE passes it: the extension's, TE's copy of it, torch's, or None."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if int(dtype) not in _TORCH_DTYPE:
        refuse(f"dtype {dtype!r}")
    return _TORCH_DTYPE[int(dtype)]


class OpenEnumMember(int):
    """A value of an OpenEnum; it never leaves Python, so its number has no meaning."""

    label: str

    def __repr__(self) -> str:
        return self.label


class OpenEnum(type):
    """An enumeration whose members appear when first named: kernels that read them are not emulated."""

    _members: dict[str, OpenEnumMember]

    def __getattr__(cls, name: str) -> OpenEnumMember:
        if name.startswith("__"):
            raise AttributeError(name)
        member = OpenEnumMember(len(cls._members))
        member.label = f"{cls.__name__}.{name}"
        cls._members[name] = member
        setattr(cls, name, member)
        return member


def open_enum(name: str) -> OpenEnum:
    """A new OpenEnum called `name`."""
    return OpenEnum(name, (), {"_members": {}})


FORWARD_TENSORS = tuple(f"GEMM{n}_{kind}" for n in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT"))
BACKWARD_TENSORS = tuple(f"GRAD_{kind}{n}" for n in (1, 2, 3) for kind in ("OUTPUT", "INPUT"))
"""The places of a module's quantizers, in the extension's order."""


class FP8TensorMeta:
    """Holder that TE fills with scales."""

    def __init__(self) -> None:
        self.scale = self.scale_inv = self.amax_history = None


class CommOverlapHelper:
    """Userbuffers (GEMM overlapped with communication)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("CommOverlapHelper (userbuffers)")


class CommOverlap(CommOverlapHelper):
    """See CommOverlapHelper."""


class CommOverlapP2P(CommOverlapHelper):
    """See CommOverlapHelper."""


class FusedAttentionBackend(enum.IntEnum):
    """NVTE_Fused_Attn_Backend of TE 2.20, which asserts that it knows exactly these."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class OldFusedAttentionBackend(enum.IntEnum):
    """NVTE_Fused_Attn_Backend while there was a separate kernel for sequences of up to 512 tokens."""

    NVTE_No_Backend = -1
    NVTE_F16_max512_seqlen = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


def fused_attention_backend(te_version: tuple[int, ...]) -> type[enum.IntEnum]:
    """The enumeration that this version of Transformer Engine names the members of."""
    return FusedAttentionBackend if te_version >= (2, 20) else OldFusedAttentionBackend


OPEN_ENUMS = (
    "CommOverlapType",
    "CommOverlapAlgo",
    "NVTE_QKV_Layout",
    "NVTE_QKV_Format",
    "NVTE_Bias_Type",
    "NVTE_Mask_Type",
    "NVTE_Softmax_Type",
    "NVTEScalingMode",
    "NVTERoutingMapFormat",
    "NVTEQBHistogramMode",
    "Float8BlockScaleTensorFormat",
)

CLASSES = {
    "FP8FwdTensors": enum.IntEnum("FP8FwdTensors", FORWARD_TENSORS, start=0),
    "FP8BwdTensors": enum.IntEnum("FP8BwdTensors", BACKWARD_TENSORS, start=0),
    "DType": DType,
    "FP8TensorMeta": FP8TensorMeta,
    "CommOverlap": CommOverlap,
    "CommOverlapP2P": CommOverlapP2P,
    "CommOverlapHelper": CommOverlapHelper,
    "CommOverlapCore": CommOverlapHelper,
}

CONSTANT_FUNCTIONS: dict[str, Any] = {
    "get_cublasLt_version": 130000,
    "get_cudnn_version": 91500,
    "get_num_cublas_streams": 4,
    "get_stream_priority_range": (0, 0),
    "ubuf_built_with_mpi": False,
    "device_supports_multicast": False,
    "nvte_built_with_cublasmp": False,
    "ep_zero_copy_supported": False,
}
"""Queries of the build and the device, with what a plain single-GPU build answers."""
