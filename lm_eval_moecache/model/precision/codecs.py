"""The codecs: a weight matrix in, the tensors that stand for it in the store out; experts encoded.

A new codec is an entry of `CODECS`, and a class where its format is new; `ladder` has its name, for
whoever does not need torch yet. Shapes: E experts; of HQQ: G groups, S weights of a group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
from packaging.version import Version
from torch import Tensor, nn

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""(shape, dtype) of each tensor that one encoded matrix consists of."""


class Codec(ABC):
    """Encodes [out, in] matrices of float weights and decodes them again.

    `layout` is a function of the shape alone, so a store can set slots of fixed size aside before
    there are any weights. `name` is what users type, the group size included. `kind` and the group
    size say what is stored.
    """

    library: ClassVar[str | None] = None
    """Package that does the work; None for torch itself."""
    minimum: ClassVar[str] = "0"
    """The library's oldest release that will do."""
    group_sizes: ClassVar[tuple[int, ...]] = ()
    """Allowed sizes of the groups of weights that share a scale; empty where there are none."""
    encodes_on: ClassVar[str | None] = None
    """Type of the device that encodes whatever the matrix lies on; None for the matrix' own."""
    as_it_lies: ClassVar[bool] = False
    """Whether a matrix is stored as the model has it, also where that is [in, out]."""

    def __init__(self, name: str, group_size: int | None = None, kind: str = "") -> None:
        """ValueError for a group size that this codec does not have."""
        if group_size is not None and group_size not in self.group_sizes:
            allowed = ", ".join(f"g{size}" for size in self.group_sizes) or "none: it has no groups"
            raise ValueError(f"precision={name!r}: the group size must be one of {allowed}.")
        self.name, self.kind = name, kind or type(self).__name__
        self.group_size = 64 if group_size is None else group_size

    @abstractmethod
    def layout(self, shape: Sequence[int]) -> Layout:
        """Return what a matrix of this shape is stored as; ValueError where it cannot be."""

    @abstractmethod
    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """Return contiguous tensors of `layout(matrix.shape)`, on the matrix' device.

        Called by several threads at a time.
        """

    @abstractmethod
    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the [out, in] matrix that computations use, at the compute dtype."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that one matrix of this shape takes in the store and on the link."""
        return sum(math.prod(size) * dtype.itemsize for size, dtype in self.layout(shape))

    def check(self, device_type: str) -> None:
        """Raise ValueError, saying what would do, where this codec cannot work on the device.

        Encodes and decodes a small matrix there: what counts is what the installed library does.
        """
        installed = self._installed_version()
        probe = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
        try:
            matrix = probe.to(device_type, torch.bfloat16)
            decoded = self.decode(self.encode(matrix), matrix.shape, torch.bfloat16)
            works = bool(decoded.isfinite().all())
            problem = "" if works else "it returns weights that are not finite"
        except Exception as error:
            # Libraries raise whatever they like where a kernel or a device is missing.
            first_line = next(iter(str(error).splitlines()), "")
            works, problem = False, f"{type(error).__name__}: {first_line}"
        if not works:
            raise ValueError(
                f"precision={self.name!r} does not work on the device {device_type!r} with "
                f"{self.library or 'torch'} {installed} ({problem}). Allowed: a device that it "
                "supports, as device=cpu, or another precision, as bf16 or fp16."
            )

    def _installed_version(self) -> str:
        try:
            found = version(self.library or "torch")
        except PackageNotFoundError:
            found = "none"
        if self.library and (found == "none" or Version(found) < Version(self.minimum)):
            raise ValueError(
                f"precision={self.name!r} needs {self.library}>={self.minimum}, but {found} is "
                f"installed. Allowed: pip install -U {self.library}, or a precision without it, as "
                "bf16 or fp16."
            )
        return found


PIECE = 1 << 17
"""Weights that are worked on at a time on a CPU: what is made between fits into a core's cache."""


def pieces(count: int, width: int, most: int = PIECE) -> list[slice]:
    """Divide `count` rows of `width` weights into pieces that are worked on one after another."""
    rows = max(1, most // width)
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


class Cast(Codec):
    """Stores the weights at a floating-point dtype; lossless where that is the model's own."""

    def __init__(self, name: str, group_size: int | None = None, *, dtype: torch.dtype) -> None:
        super().__init__(name, group_size, kind=str(dtype))
        self.dtype = dtype

    def layout(self, shape: Sequence[int]) -> Layout:
        return ((tuple(shape), self.dtype),)

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        return (matrix.to(self.dtype).contiguous(),)

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return tensors[0].to(dtype)


class AsStored(Cast):
    """Leaves matrices of this dtype as transformers has made them; no level of a ladder."""

    library: ClassVar[str | None] = "transformers"
    as_it_lies: ClassVar[bool] = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(str(dtype).removeprefix("torch."), dtype=dtype)


class Int8(Codec):
    """bitsandbytes int8_vectorwise_quant: an int8 per weight; per row its largest, in float32.

    The weights of LLM.int8() (Dettmers et al. 2022), as in SpecMD section 5.1. Its other half,
    int8 activations with outliers held back, belongs to its matrix product: here the decoded
    weights are multiplied at the compute dtype. Quantised from float16, as the library asks.
    """

    library: ClassVar[str | None] = "bitsandbytes"
    minimum: ClassVar[str] = "0.46.1"

    def layout(self, shape: Sequence[int]) -> Layout:
        return ((tuple(shape), torch.int8), ((shape[0],), torch.float32))

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        from bitsandbytes.functional import int8_vectorwise_quant

        if matrix.device.type != "cpu":
            weights, absmax, _ = int8_vectorwise_quant(matrix.to(torch.float16).contiguous())
            return weights, absmax
        weights = torch.empty(matrix.shape, dtype=torch.int8)
        absmax = torch.empty(len(matrix))
        for rows in pieces(len(matrix), matrix.shape[1], most=4 * PIECE):
            part = matrix[rows].to(torch.float16).contiguous()
            weights[rows], absmax[rows], _ = int8_vectorwise_quant(part)
        return weights, absmax

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        weights, absmax = tensors
        if weights.device.type != "cpu":
            return int8_vectorwise_dequant(weights, absmax).to(dtype)  # type: ignore[no-any-return]
        # The library's arithmetic, without its temporaries of the whole matrix: the same bits.
        decoded = torch.empty(tuple(shape), dtype=dtype)
        parts = pieces(*weights.shape)
        piece = torch.empty(weights[parts[0]].shape)
        for rows in parts:
            target = decoded[rows]
            scaled = piece[: len(target)].copy_(weights[rows])
            target.copy_(scaled.mul_(absmax[rows, None]).mul_(_PER_STEP))
        return decoded


_PER_STEP = 7.874015718698502e-3
"""1 / 127, as bitsandbytes has it."""


class FourBit(Codec):
    """bitsandbytes quantize_4bit: 4 bits per weight; per group of them the largest, in float32.

    The 16 levels of nf4 fit normally distributed weights (QLoRA, Dettmers et al. 2023); those of
    fp4 are of a float with sign, exponent and mantissa. Groups run along the rows and over their
    ends; scales are not quantised again.
    """

    library: ClassVar[str | None] = "bitsandbytes"
    minimum: ClassVar[str] = "0.46.1"
    group_sizes: ClassVar[tuple[int, ...]] = (64, 128, 256, 512, 1024, 2048, 4096)

    def __init__(self, name: str, group_size: int | None = None, *, quant_type: str) -> None:
        super().__init__(name, group_size, kind=quant_type)
        self.quant_type = quant_type

    def layout(self, shape: Sequence[int]) -> Layout:
        count = math.prod(shape)
        packed = (-(-count // 2), 1)
        return ((packed, torch.uint8), ((-(-count // self.group_size),), torch.float32))

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        from bitsandbytes.functional import quantize_4bit

        packed, state = quantize_4bit(
            matrix.contiguous(), blocksize=self.group_size, quant_type=self.quant_type
        )
        return packed, state.absmax

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        packed, absmax = tensors
        state = QuantState(
            absmax,
            shape=torch.Size(shape),
            blocksize=self.group_size,
            quant_type=self.quant_type,
            dtype=dtype,
        )
        decoded: Tensor = dequantize_4bit(packed, state)
        # The library takes a packed matrix of one row for a transposed one, and turns it back.
        return decoded.reshape(tuple(shape))


ITERATIONS, BETA, NORM = 20, 10.0, 0.7
"""HQQ's own settings: steps at most, and what its shrinking operator takes."""
SMALLEST, LARGEST_SCALE = 1e-4, 2e4
"""A group that spans less than this is not stretched, and none more than so much."""


class HalfQuadratic(Codec):
    """HQQ (Badri and Shaji 2023): `bits` per weight; a float16 scale and zero per group.

    Groups run along the rows (`axis=1`), the form that fast kernels take; scale and zero are
    float16, HQQ's default. Encoded on the CPU whatever the device: HQQ optimises in half precision
    on CUDA and in float32 on a CPU, so that the codes would differ by device. Decoded in float32
    and then rounded to the compute dtype, which loses less than HQQ's own arithmetic in the compute
    dtype and is the same on every device.

    The library's steps, taken over pieces of a matrix that a core's cache holds, give the
    library's codes to the last bit. A matrix cannot be divided further: the error that ends the
    search is its mean.
    """

    library: ClassVar[str | None] = "hqq"
    minimum: ClassVar[str] = "0.2.7"
    group_sizes: ClassVar[tuple[int, ...]] = (8, 16, 32, 64, 128, 256)
    encodes_on: ClassVar[str | None] = "cpu"

    def __init__(self, name: str, group_size: int | None = None, *, bits: int) -> None:
        super().__init__(name, group_size, kind=f"hqq{bits}")
        self.bits = bits
        # Of three bits, ten in 32: 3.2 bits stored.
        self._word, self._per_word = (torch.int32, 10) if bits == 3 else (torch.uint8, 8 // bits)
        self._top = 2**bits - 1

    def layout(self, shape: Sequence[int]) -> Layout:
        # Words pack weights of different groups; three bits alone pad what is left over.
        step = self.group_size * (1 if self.bits == 3 else self._per_word)
        groups = math.prod(shape) // self.group_size
        if math.prod(shape) % step:
            raise ValueError(
                f"precision={self.name!r} stores weights in groups that need a multiple of {step} "
                f"weights, but an expert matrix of this model is {tuple(shape)}. Allowed: a "
                f"smaller group, as '{self.name.partition('/')[0]}/g{min(self.group_sizes)}', or a "
                "precision without groups, as int8 or bf16."
            )
        scales = ((groups, 1), torch.float16)
        packed = (-(-groups // self._per_word), self.group_size)
        return ((packed, self._word), scales, scales)

    @torch.no_grad()
    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        from hqq.core.quantize import Quantizer

        weights_GS = matrix.cpu().float().reshape(-1, self.group_size)
        scale_G1, zero_G1 = self._search(weights_GS)
        codes_GS = torch.empty(weights_GS.shape, dtype=torch.uint8)
        for rows in pieces(*weights_GS.shape):
            scaled = (weights_GS[rows] * scale_G1[rows]).add_(zero_G1[rows])
            codes_GS[rows] = scaled.round_().clamp_(0, self._top)
        packed = Quantizer.pack[Quantizer.bit_to_packing[self.bits]](codes_GS)
        parts = (packed, (1.0 / scale_G1).half(), zero_G1.half())
        return tuple(part.to(matrix.device) for part in parts)

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        packed, scale, zero = tensors
        device = packed.device
        decoded = torch.empty((len(scale), self.group_size), dtype=dtype, device=device)
        parts = pieces(*packed.shape) if device.type == "cpu" else [slice(None)]
        piece = torch.empty(packed[parts[0]].shape, device=device)
        for part in range(self._per_word):
            shift = self.bits * (self._per_word - 1 - part)
            # Codes stay where they are in their words: scale and zero are shifted instead, which is
            # exact, as both are multiples of powers of two.
            place = 2.0**shift
            groups = slice(part * len(packed), min((part + 1) * len(packed), len(scale)))
            scales, zeros = scale[groups].float() / place, zero[groups].float() * place
            target = decoded[groups]
            for rows in parts:
                here = target[rows]
                codes = packed[rows][: len(here)] & (self._top << shift)
                found = piece[: len(here)].copy_(codes)
                here.copy_(found.sub_(zeros[rows]).mul_(scales[rows]))
        return decoded.reshape(tuple(shape))

    def _search(self, weights_GS: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale (codes per weight) and zero of each group, as HQQ's optimiser finds them."""
        from hqq.core.optimize import optimize_weights_proximal_legacy_step as library_step

        least, most = weights_GS.aminmax(dim=1, keepdim=True)
        span = most - least
        scale_G1 = torch.where(span <= SMALLEST, 1.0, self._top / span).clamp_(max=LARGEST_SCALE)
        zero_G1 = -least * scale_G1
        if self.bits == 4:  # As HQQ's own configurations do.
            zero_G1.round_()
        error_GS, best = torch.empty_like(weights_GS), torch.inf
        for _ in range(ITERATIONS):
            for rows in pieces(*weights_GS.shape):
                weights = weights_GS[rows]
                near, _, zero_G1[rows], _ = library_step(
                    weights, scale_G1[rows], zero_G1[rows], [0, self._top], BETA, NORM, 1
                )
                torch.sub(weights, near, out=error_GS[rows]).abs_()
            error = float(error_GS.mean())
            if not error < best:
                break
            best = error
        return scale_G1, zero_G1


CODECS: dict[str, Callable[[str, int | None], Codec]] = {
    "bf16": partial(Cast, dtype=torch.bfloat16),
    "fp16": partial(Cast, dtype=torch.float16),
    "fp32": partial(Cast, dtype=torch.float32),
    "int8": Int8,
    "nf4": partial(FourBit, quant_type="nf4"),
    "fp4": partial(FourBit, quant_type="fp4"),
    "hqq8": partial(HalfQuadratic, bits=8),
    "hqq4": partial(HalfQuadratic, bits=4),
    "hqq3": partial(HalfQuadratic, bits=3),
    "hqq2": partial(HalfQuadratic, bits=2),
}
"""Name -> what makes the codec of a level and a group size."""


Encoded = list[tuple[Tensor, ...]]
"""Level -> the tensors [E, ...] that one parameter is stored as."""


def expert_matrices(experts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an experts module that hold one matrix for each expert."""
    named = experts.named_parameters(recurse=False)
    return {name: tensor.data for name, tensor in named if is_matrices(experts, tensor)}


def is_matrices(experts: nn.Module, tensor: Tensor) -> bool:
    return tensor.dim() == 3 and tensor.shape[0] == experts.num_experts


def matrix_shape(experts: nn.Module, stacked: Tensor) -> tuple[int, int]:
    """Return [out, in] of one expert's matrix, however the module has it lie."""
    _, first, second = stacked.shape
    return (second, first) if experts.is_transposed else (first, second)


def expert_bytes(experts: nn.Module, codecs: Sequence[Codec]) -> tuple[int, ...]:
    """Return the size of one expert at each level: matrices encoded, biases as they are."""
    matrices = expert_matrices(experts)
    plain = sum(p.nbytes for p in experts.parameters()) - sum(m.nbytes for m in matrices.values())
    num_experts = len(next(iter(matrices.values())))
    shapes = [matrix_shape(experts, stacked) for stacked in matrices.values()]
    return tuple(
        sum(codec.nbytes(shape) for shape in shapes) + plain // num_experts for codec in codecs
    )


def decode(experts: nn.Module, stacked: Tensor, tensors: Sequence[Tensor], codec: Codec) -> Tensor:
    """Return one expert's matrix as computations use it; `stacked` gives shape and dtype."""
    matrix = codec.decode(tensors, matrix_shape(experts, stacked), stacked.dtype)
    return matrix.t() if experts.is_transposed else matrix


def shape_without_memory(tensor: Tensor, device: Any = None) -> nn.Parameter:
    """Return a parameter of the tensor's shape and dtype that takes one number's memory.

    On the tensor's device, or on another one.
    """
    one = torch.zeros((), dtype=tensor.dtype, device=device or tensor.device)
    return nn.Parameter(one.expand(tensor.shape), requires_grad=False)


def takes_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a shape that `shape_without_memory` has made."""
    return tensor.numel() > 1 and not any(tensor.stride())


BYTES_PER_WEIGHT = 20
"""What any codec takes for a moment beside the matrix and its codes."""
MOST_BYTES = 2**30
"""What all matrices that are encoded at one time may take so."""


def encode(
    experts: nn.Module,
    stacked: Tensor,
    codecs: Sequence[Codec],
    noted: Callable[[], object] = lambda: None,
) -> Encoded:
    """Encode one parameter [E, ...], and call `noted` after each expert at each level.

    Experts are encoded side by side, each by one thread: HQQ ends its search by an error of a
    matrix, so that experts in one tensor would stop each other's, and sums by several threads round
    differently. Into tensors that are there before: small ones that stay, between others that
    go, would keep the heap from shrinking.
    """
    found: Encoded = []
    for codec in codecs:
        turned = experts.is_transposed and not codec.as_it_lies
        matrices = [m.t() if turned else m for m in stacked.detach()]
        shape = tuple(matrices[0].shape)
        kept = tuple(
            torch.empty((len(matrices), *size), dtype=dtype, device=stacked.device)
            for size, dtype in codec.layout(shape)
        )
        on_cpu = (codec.encodes_on or stacked.device.type) == "cpu"
        at_once = workers(math.prod(shape)) if on_cpu else 1

        def task(expert: int, matrix: Tensor, codec: Codec = codec, kept: Any = kept) -> None:
            for whole, part in zip(kept, codec.encode(matrix), strict=True):
                whole[expert].copy_(part)

        tasks = (partial(task, expert, matrix) for expert, matrix in enumerate(matrices))
        for _ in side_by_side(tasks, at_once):
            noted()
        found.append(kept)
    return found


def workers(num_weights: int) -> int:
    """Return how many matrices of this size are encoded at a time: as many as torch has threads."""
    return max(1, min(torch.get_num_threads(), MOST_BYTES // (BYTES_PER_WEIGHT * num_weights)))


def side_by_side(tasks: Iterable[Callable[[], None]], at_once: int) -> Iterator[None]:
    """Run tasks in so many threads of one core each; yield as they end, in their order.

    What a task raises is raised here, once those that have begun are done; no other begins.
    """
    if at_once == 1:
        for task in tasks:
            yield task()
        return
    threads = torch.get_num_threads()
    # torch keeps this number for each thread, and the last one given for threads to come.
    pool = ThreadPoolExecutor(at_once, "moecache-encode", torch.set_num_threads, (1,))
    try:
        yield from pool.map(lambda task: task(), tasks)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
