"""Codecs: encode weight matrices into the tensors that a store holds, and decode them again.

To add a codec, add an entry to `CODECS`, a class if its format is new, and its name to `ladder`,
which is read without importing torch. Shapes: E experts; in HQQ, G groups of S weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""(shape, dtype) of each tensor that one encoded matrix consists of."""


class Codec(ABC):
    """Encodes [out, in] matrices of float weights and decodes them again.

    `layout` depends on the shape alone, so a store can allocate slots of fixed size before there
    are any weights. `name` is what users type, including the group size. `kind` and the group size
    identify the stored format.
    """

    library: ClassVar[str | None] = None
    """Package that does the work; None for torch itself."""
    group_sizes: ClassVar[tuple[int, ...]] = ()
    """Allowed sizes of the groups of weights that share a scale; empty where there are none."""
    encodes_on: ClassVar[str | None] = None
    """Device type that encodes, wherever the matrix is; None for the matrix' own device."""
    as_it_lies: ClassVar[bool] = False
    """Whether a matrix is stored in the model's orientation, even if that is [in, out]."""

    def __init__(self, name: str, group_size: int | None = None, kind: str = "") -> None:
        """Raise ValueError for a group size that this codec does not support."""
        if group_size is not None and group_size not in self.group_sizes:
            allowed = ", ".join(f"g{size}" for size in self.group_sizes) or "none: it has no groups"
            raise ValueError(f"precision={name!r}: the group size must be one of {allowed}.")
        self.name, self.kind = name, kind or type(self).__name__
        self.group_size = 64 if group_size is None else group_size

    @abstractmethod
    def layout(self, shape: Sequence[int]) -> Layout:
        """Return the layout that stores a matrix of this shape; ValueError where none can."""

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
        """Raise ValueError, naming alternatives, where this codec does not work on the device.

        Encodes and decodes a small matrix there: only the installed library knows.
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
            return version(self.library or "torch")
        except PackageNotFoundError as error:
            raise ValueError(
                f"precision={self.name!r} needs {self.library}, which is not installed. Allowed: "
                f"pip install {self.library}, or a precision without it, as bf16 or fp16."
            ) from error


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
    """Stores matrices of this dtype as transformers loads them; not a level of a ladder."""

    library: ClassVar[str | None] = "transformers"
    as_it_lies: ClassVar[bool] = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(str(dtype).removeprefix("torch."), dtype=dtype)


class Int8(Codec):
    """bitsandbytes int8_vectorwise_quant: int8 weights, a float32 absmax per row.

    The weights of LLM.int8() (Dettmers et al. 2022), as in SpecMD section 5.1. Its other half,
    int8 activations with outliers kept separate, belongs to its matrix product: here decoded
    weights are multiplied at the compute dtype. Quantised from float16, as the library requires.
    """

    library: ClassVar[str | None] = "bitsandbytes"

    def layout(self, shape: Sequence[int]) -> Layout:
        return ((tuple(shape), torch.int8), ((shape[0],), torch.float32))

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        from bitsandbytes.functional import int8_vectorwise_quant

        weights, absmax, _ = int8_vectorwise_quant(matrix.to(torch.float16).contiguous())
        return weights, absmax

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        decoded: Tensor = int8_vectorwise_dequant(*tensors)
        return decoded.to(dtype)


class FourBit(Codec):
    """bitsandbytes quantize_4bit: 4-bit weights, a float32 absmax per group.

    The 16 levels of nf4 fit normally distributed weights (QLoRA, Dettmers et al. 2023); those of
    fp4 are a float's, with sign, exponent and mantissa. Groups run along the rows and across their
    ends; scales are not quantised again.
    """

    library: ClassVar[str | None] = "bitsandbytes"
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
        # The library takes a packed matrix of one row for a transposed one, and transposes it.
        return decoded.reshape(tuple(shape))


class HalfQuadratic(Codec):
    """HQQ (Badri and Shaji 2023): `bits` per weight; a float16 scale and zero per group.

    Groups run along the rows (`axis=1`), the form that fast kernels take; scale and zero are
    float16, HQQ's default. Encoded on the CPU whatever the device: HQQ optimises in half precision
    on CUDA and in float32 on a CPU, so codes would differ by device. Decoded in float32 and then
    rounded to the compute dtype, which loses less than HQQ's own arithmetic in the compute dtype
    and is the same on every device.
    """

    library: ClassVar[str | None] = "hqq"
    group_sizes: ClassVar[tuple[int, ...]] = (8, 16, 32, 64, 128, 256)
    encodes_on: ClassVar[str | None] = "cpu"

    def __init__(self, name: str, group_size: int | None = None, *, bits: int) -> None:
        super().__init__(name, group_size, kind=f"hqq{bits}")
        self.bits = bits
        # Three-bit codes go ten to a 32-bit word: 3.2 bits each.
        self._word, self._per_word = (torch.int32, 10) if bits == 3 else (torch.uint8, 8 // bits)

    def layout(self, shape: Sequence[int]) -> Layout:
        # Words pack weights of different groups; only those of three bits may be padded.
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

    def encode(self, matrix: Tensor) -> tuple[Tensor, ...]:
        from hqq.core.quantize import Quantizer

        packed, meta = Quantizer.quantize(
            matrix.cpu(),
            nbits=self.bits,
            group_size=self.group_size,
            round_zero=self.bits == 4,  # As HQQ's own configurations do.
            axis=1,
            device="cpu",
        )
        parts = (packed, meta["scale"].half(), meta["zero"].half())
        return tuple(part.to(matrix.device) for part in parts)

    def decode(self, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        from hqq.core.quantize import Quantizer

        packed, scale, zero = tensors
        meta = {
            "nbits": self.bits,
            "group_size": self.group_size,
            "shape": tuple(shape),
            "scale": scale.float(),
            "zero": zero.float(),
            "axis": 1,
            "packing": Quantizer.bit_to_packing[self.bits],
            "view_as_float": False,
            "compute_dtype": torch.float32,
        }
        decoded: Tensor = Quantizer.dequantize(packed, meta)
        return decoded.to(dtype)


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
"""Name -> factory of the codec of a level and a group size."""


Encoded = list[dict[str, Tensor]]
"""Level -> part's name (`part_of`) -> the tensor [E, ...] that it is stored as."""


def expert_matrices(experts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an experts module that hold one matrix for each expert."""
    parameters = experts.named_parameters(recurse=False)
    return {name: tensor.data for name, tensor in parameters if is_matrices(experts, tensor)}


def expert_parameters(experts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an experts module that have one entry for each expert."""
    return {
        name: parameter.data
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() > 1 and parameter.shape[0] == experts.num_experts
    }


def plain_parameters(experts: nn.Module) -> dict[str, Tensor]:
    """Return those of `expert_parameters` that no codec encodes, such as biases."""
    parameters = expert_parameters(experts).items()
    return {name: tensor for name, tensor in parameters if not is_matrices(experts, tensor)}


def part_of(name: str, index: int) -> str:
    """Return the name of one of the tensors that a parameter is stored as."""
    return f"{name}.{index}"


def is_matrices(experts: nn.Module, tensor: Tensor) -> bool:
    """Whether a parameter holds one matrix per expert: [experts, rows, columns]."""
    return tensor.dim() == 3 and tensor.shape[0] == experts.num_experts


def matrix_shape(experts: nn.Module, stacked: Tensor) -> tuple[int, int]:
    """Return one expert's matrix shape as [out, in], whatever the module's orientation."""
    _, first, second = stacked.shape
    return (second, first) if experts.is_transposed else (first, second)


def expert_bytes(experts: nn.Module, codecs: Sequence[Codec]) -> tuple[int, ...]:
    """Return one expert's bytes at each level: encoded matrices and unencoded biases."""
    matrices = expert_matrices(experts)
    plain = sum(p.nbytes for p in experts.parameters()) - sum(m.nbytes for m in matrices.values())
    num_experts = len(next(iter(matrices.values())))
    shapes = [matrix_shape(experts, stacked) for stacked in matrices.values()]
    return tuple(
        sum(codec.nbytes(shape) for shape in shapes) + plain // num_experts for codec in codecs
    )


def decode(
    experts: nn.Module, name: str, stacked: Tensor, row: Mapping[str, Tensor], codec: Codec
) -> Tensor:
    """Return one expert's matrix in the module's orientation, with `stacked`'s shape and dtype.

    `row` holds the expert's parts by name, those of other parameters perhaps among them.
    """
    shape = matrix_shape(experts, stacked)
    tensors = [row[part_of(name, i)] for i in range(len(codec.layout(shape)))]
    matrix = codec.decode(tensors, shape, stacked.dtype)
    return matrix.t() if experts.is_transposed else matrix


def shape_without_memory(tensor: Tensor, device: Any = None) -> nn.Parameter:
    """Return a parameter of the tensor's shape and dtype that takes the memory of one element.

    On the tensor's device unless another is given.
    """
    element = torch.zeros((), dtype=tensor.dtype, device=device or tensor.device)
    return nn.Parameter(element.expand(tensor.shape), requires_grad=False)


def takes_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor was made by `shape_without_memory`."""
    return tensor.numel() > 1 and not any(tensor.stride())


BYTES_PER_WEIGHT = 32
"""Temporary memory of any codec while it encodes, besides the matrix and its codes."""
MOST_BYTES = 2**30
"""Limit on the temporary memory of all matrices encoded at one time."""


def encode(
    experts: nn.Module,
    name: str,
    stacked: Tensor,
    codecs: Sequence[Codec],
    noted: Callable[[], object] = lambda: None,
) -> Encoded:
    """Encode the parameter `name`, [E, ...], and call `noted` after each expert at each level.

    Experts are encoded in parallel, each by one thread: HQQ's search ends by a matrix' error, so
    that experts in one tensor would end each other's, and sums by several threads round
    differently. Their tensors are allocated first: small ones that stay among temporaries would
    keep the heap from shrinking.
    """
    levels: Encoded = []
    for codec in codecs:
        transposed = experts.is_transposed and not codec.as_it_lies
        matrices = [m.t() if transposed else m for m in stacked.detach()]
        shape = tuple(matrices[0].shape)
        stored = tuple(
            torch.empty((len(matrices), *size), dtype=dtype, device=stacked.device)
            for size, dtype in codec.layout(shape)
        )
        on_cpu = (codec.encodes_on or stacked.device.type) == "cpu"
        num_threads = workers(math.prod(shape)) if on_cpu else 1

        def task(expert: int, matrix: Tensor, codec: Codec = codec, stored: Any = stored) -> None:
            for stack, part in zip(stored, codec.encode(matrix), strict=True):
                stack[expert].copy_(part)

        tasks = (partial(task, expert, matrix) for expert, matrix in enumerate(matrices))
        for _ in side_by_side(tasks, num_threads):
            noted()
        levels.append({part_of(name, i): tensor for i, tensor in enumerate(stored)})
    return levels


def workers(num_weights: int) -> int:
    """Return how many matrices of this size are encoded at a time: torch's threads, or fewer."""
    return max(1, min(torch.get_num_threads(), MOST_BYTES // (BYTES_PER_WEIGHT * num_weights)))


def side_by_side(tasks: Iterable[Callable[[], None]], at_once: int) -> Iterator[None]:
    """Run tasks in `at_once` threads of one core each; yield as they end, in order.

    A task's exception is raised here once the running tasks have ended; no other starts.
    """
    if at_once == 1:
        for task in tasks:
            yield task()
        return
    threads = torch.get_num_threads()
    # torch keeps this number per thread, and gives new threads the last one set.
    pool = ThreadPoolExecutor(at_once, "moecache-encode", torch.set_num_threads, (1,))
    try:
        yield from pool.map(lambda task: task(), tasks)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
