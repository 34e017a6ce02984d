"""NVFP4 in safetensors files of other tools: NVIDIA ModelOpt and compressed-tensors (docs/package.md)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.block_scaled import GROUP, BlockScaled
from model.formats import E2M1, E4M3, is_nan_scale
from model.memory import pack_nibbles, unpack_nibbles
from model.safetensors_file import SafetensorsFile

__all__ = ["COMPRESSED_TENSORS", "LAYOUTS", "MODELOPT", "WEIGHTS_ONLY", "Layout", "layout_of", "quantised_shapes"]

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    """Where a tool keeps the parts of an NVFP4 matrix, beside ``{module}.weight_scale`` (N, K / 16) of E4M3.

    Attributes
    ----------
    name : str
        As ``quant_method`` of the configuration.
    codes : str
        Suffix of the codes, U8 (N, K / 2), element 2i in the low nibble.
    scale : str
        Suffix of the tensor scale, F32.
    divides : bool
        The tensor scale divides, being ``2688 / amax``; else it multiplies, being ``amax / 2688``.
    scale_shape : tuple of int
        Shape of the tensor scale as the tool writes it; a reader takes any shape of one element.
    """

    name: str
    codes: str
    scale: str
    divides: bool
    scale_shape: tuple[int, ...]

    def tensors(self, module: str, rows: int, k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return element type and shape of the tensors of a matrix, by name.

        Raises
        ------
        ValueError
            K is no multiple of 16.
        """
        if k % GROUP:
            raise ValueError(f"K of {module} must be a multiple of {GROUP} in this format, not {k}")
        return {
            f"{module}.{self.codes}": ("U8", (rows, k // 2)),
            f"{module}.weight_scale": ("F8_E4M3", (rows, k // GROUP)),
            f"{module}.{self.scale}": ("F32", self.scale_shape),
        }

    def arrays(self, module: str, tensor: BlockScaled) -> dict[str, NDArray]:
        """Return the tensors of a matrix; a reciprocal tensor scale is rounded to float32."""
        k, t = tensor.length, np.float32(tensor.tensor_scale)
        with np.errstate(over="ignore"):
            scale = np.float32(1) / t if self.divides else t
        if not np.isfinite(scale):
            raise ValueError(f"tensor_scale of {module} must have a finite reciprocal, not {t}")
        return {
            f"{module}.{self.codes}": pack_nibbles(tensor.codes[:, :k]),
            f"{module}.weight_scale": np.ascontiguousarray(tensor.scales[:, : k // GROUP]),
            f"{module}.{self.scale}": np.full(self.scale_shape, scale, "<f4"),
        }

    def read(self, module: str, files: Mapping[str, SafetensorsFile]) -> Float:
        """Return the dense matrix of a module, float32, in the order of operations of the tool itself.

        Raises
        ------
        ValueError
            A tensor has another type or shape than the layout, or a scale is not a positive number.
        """
        shape = self.shape(module, files)
        names = self.tensors(module, *shape)
        codes, scales, tensor_scale = (files[name].read(name) for name in names)
        if is_nan_scale(scales).any():
            raise ValueError(f"scales of tensor {module}.weight_scale must be from 0x00 to 0x7e")
        scale = np.float32(tensor_scale.reshape(()))
        if not (np.isfinite(scale) and scale > 0):
            raise ValueError(f"tensor {module}.{self.scale} must be positive and finite, not {scale}")
        decoded = E4M3.decode(scales)
        # What overflows is refused as not finite by who asked for it.
        with np.errstate(over="ignore", invalid="ignore"):
            steps = decoded / scale if self.divides else decoded * scale
            return E2M1.decode(unpack_nibbles(codes)) * np.repeat(steps, GROUP, axis=1)

    def shape(self, module: str, files: Mapping[str, SafetensorsFile]) -> tuple[int, int]:
        """Return the dense shape (N, K) of a module; raises like :meth:`read`."""
        place = files[f"{module}.{self.codes}"].shapes[f"{module}.{self.codes}"]
        if len(place) != 2:
            raise ValueError(f"tensor {module}.{self.codes} must have two axes, not shape {place}")
        shape = place[0], 2 * place[1]
        for name, wanted in self.tensors(module, *shape).items():
            if name not in files:
                raise ValueError(f"the checkpoint must have tensor {name}")
            found = files[name].types[name], files[name].shapes[name]
            if found != wanted and not (wanted[0] == found[0] == "F32" and found[1] in ((), (1,))):
                raise ValueError(f"type and shape of tensor {name} must be {wanted}, not {found}")
        return shape

    def configuration(self, ignore: list[str]) -> dict[str, Any]:
        """Return what ``quantization_config`` of a configuration says of weights in this layout, activations as they are."""
        weights = {"num_bits": 4, "type": "float", "group_size": GROUP, "dynamic": False}
        if self.divides:
            weights |= {"strategy": "tensor_group", "symmetric": True}
        group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
        common = {"quant_method": self.name, "config_groups": {"group_0": group}, "ignore": ignore}
        if self.divides:
            return common | {"format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
        # Runtimes look for this name of the producer before they read on.
        return common | {"quant_algo": WEIGHTS_ONLY, "producer": {"name": self.name, "version": "autoematic-rtl"}}


WEIGHTS_ONLY = "W4A16_NVFP4"
"""What ModelOpt calls NVFP4 without scales of inputs; runtimes that are told NVFP4 would use some that are not there."""

MODELOPT = Layout("modelopt", "weight", "weight_scale_2", False, ())
COMPRESSED_TENSORS = Layout("compressed-tensors", "weight_packed", "weight_global_scale", True, (1,))
LAYOUTS = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS)}

_OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Static scales of what is not in the checkpoint."""


def layout_of(quantisation: Any) -> Layout | None:
    """Return the layout that ``quantization_config`` of a configuration names; None for None.

    Raises
    ------
    ValueError
        It names something else than NVFP4 of one of the two tools.
    """
    if quantisation is None:
        return None
    if isinstance(quantisation, dict):
        method, algorithm, form = (quantisation.get(key) for key in ("quant_method", "quant_algo", "format"))
        if method == MODELOPT.name and algorithm in ("NVFP4", WEIGHTS_ONLY):
            return MODELOPT
        if method == COMPRESSED_TENSORS.name and form == "nvfp4-pack-quantized":
            return COMPRESSED_TENSORS
    raise ValueError(
        "quantization_config of config.json must be NVFP4 of modelopt or nvfp4-pack-quantized of compressed-tensors, "
        f"not {quantisation!r}"
    )


def quantised_shapes(
    layout: Layout, files: Mapping[str, SafetensorsFile]
) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """Find the NVFP4 matrices of a checkpoint.

    Parameters
    ----------
    layout : Layout
    files : mapping of str to SafetensorsFile
        File of each tensor.

    Returns
    -------
    shapes : dict of str to (int, int)
        Dense shape by module.
    used : set of str
        All tensors that belong to one, or that only concern activations.

    Raises
    ------
    ValueError
        A part is missing, of another type or shape, or one of the other layout.
    """
    for other in LAYOUTS.values():
        wrong = [name for name in files if other is not layout and name.endswith(f".{other.scale}")]
        if wrong:
            raise ValueError(f"tensors must be laid out as {layout.name} does, not {min(wrong)}")
    ends = f".{layout.scale}"
    modules = [name.removesuffix(ends) for name in files if name.endswith(ends)]
    for module in modules:
        if f"{module}.{layout.codes}" not in files:
            raise ValueError(f"the checkpoint must have tensor {module}.{layout.codes}")
    shapes = {module: layout.shape(module, files) for module in modules}
    used = {name for module, shape in shapes.items() for name in layout.tensors(module, *shape)}
    return shapes, used | {name for name in files if name.endswith(_OF_ACTIVATIONS)}
