"""A checkpoint directory, of which a rank reads everything but the other ranks' experts.

transformers loads it, with its own renamings and conversions; what it gets are the tensors that this rank needs, each
read when it is asked for: dense ones are views of the mapped file, experts are copied out of it. Files may keep experts
one by one (``...experts.7.up_proj.weight``) or all of a block in one tensor, of which only this rank's rows are read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import BootstrapConfig, resolve_device
from ...errors import config_error
from ...placement import Placement
from .experts import WHOLE, experts_modules, find_experts, planes_of

ONE_EXPERT = re.compile(r"\.experts\.(\d+)\.")
ALL_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(_bias|\.bias|\.weight)?$")
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_share(
    path: str | os.PathLike[str], bootstrap: BootstrapConfig, dtype: torch.dtype | None
) -> tuple[Any, tuple[str, ...]]:
    """The model with this rank's experts only, and the names of the tensors that were read.

    Raises:
        MoEEpConfigError: not a directory with an unquantised MoE model in safetensors files, or tensors are missing.
    """
    from transformers.utils import logging

    model_class, config = model_class_of(path)
    num_experts = find_experts(_on_meta(model_class, config, torch.float32))[0].form[0]
    own = Placement.contiguous(num_experts, bootstrap.world_size).experts_of(bootstrap.rank)
    stored = Tensors(Path(path))
    wanted, dtype = stored.wanted(own), dtype or _dtype(config) or stored.dtype()
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model, info = _with_few_experts(model_class, len(own)).from_pretrained(
            None, config=config, state_dict=wanted, dtype=dtype, output_loading_info=True
        )
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    model.__class__ = model_class
    missing = [name for name in info["missing_keys"] if own or ".experts." not in name]
    if missing:
        raise config_error(f"model: {path}", f"no tensors for {sorted(missing)[:4]}", "a complete checkpoint")
    _take_generation_config(model, path)
    return model.to(resolve_device(bootstrap)).eval(), tuple(stored.read)


def meta_model(path: str | os.PathLike[str], dtype: torch.dtype | None) -> nn.Module:
    """The whole model without memory."""
    model_class, config = model_class_of(path)
    return _on_meta(model_class, config, dtype or _dtype(config) or Tensors(Path(path)).dtype())


def model_class_of(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """The class that a directory's config names, and the config."""
    import transformers

    if not (Path(path) / "config.json").is_file():
        raise config_error("model", f"{os.fspath(path)!r}", "a directory with config.json and safetensors files")
    # Before transformers reads it, which may want a library for the quantisation only to say no.
    refuse_quantised(json.loads((Path(path) / "config.json").read_text()))
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    model_class = next((found for found in named if found is not None), None)
    if model_class is None:
        raise config_error(
            f"model: {path}: architectures", config.architectures, "one that this transformers has", "upgrade it"
        )
    return model_class, config


def refuse_quantised(config: Any) -> None:
    """Raise MoEEpConfigError, with its name, where a config (object or dict) tells of a quantisation."""
    get = config.get if isinstance(config, dict) else lambda name: getattr(config, name, None)
    found = get("quantization_config")
    if not found:
        return
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    name = getattr(method, "value", method) or "of an unnamed kind"
    raise config_error(
        "model: quantization_config",
        f"weights quantised with {name}",
        "unquantised weights in float32, bfloat16 or float16",
        "dequantise the checkpoint, or take one that is not quantised",
    )


class Tensors:
    """The tensors of a directory's safetensors files.

    Attributes:
        read: names of those that were read, in that order.
    """

    def __init__(self, path: Path) -> None:
        index = path / "model.safetensors.index.json"
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._file_of = {name: path / file for name, file in files.items()}
        else:
            self._file_of = {name: file for file in sorted(path.glob("*.safetensors")) for name in _names(file)}
        if not self._file_of:
            raise config_error(f"model: {path}", "no *.safetensors files", "a checkpoint in safetensors files")
        self._path = path
        self._opened: dict[Path, Any] = {}
        self.read: list[str] = []

    def wanted(self, experts: Sequence[int]) -> dict[str, Tensor]:
        """All but other ranks' experts, not yet read. ``experts`` are contiguous."""
        wanted = {}
        for name in self._file_of:
            one = ONE_EXPERT.search(name)
            if one is not None:
                if int(one[1]) in experts:
                    wanted[name] = Tensor(self, name, copied=True)
            elif ALL_EXPERTS.search(name) is None:
                wanted[name] = Tensor(self, name)
            elif experts:
                wanted[name] = Tensor(self, name, slice(experts[0], experts[-1] + 1), copied=True)
        return wanted

    def dtype(self) -> torch.dtype:
        """The first floating type in the files."""
        return next(FLOATS[kind] for kind in (self.lazy(name).get_dtype() for name in self._file_of) if kind in FLOATS)

    def lazy(self, name: str) -> Any:
        """A tensor that is read where it is indexed."""
        file = self._file_of[name]
        if file not in self._opened:
            if not file.is_file():
                raise config_error(f"model: {self._path}", f"no {file.name}", "all files that the index names")
            self._opened[file] = _open(file)
        return self._opened[file].get_slice(name)


class Tensor:
    """What transformers takes for a tensor of a safetensors file: ``[...]`` reads it.

    Args:
        rows: which of its rows, along the experts; ``None`` for all.
        copied: whether it shall leave the mapped file.
    """

    def __init__(self, stored: Tensors, name: str, rows: slice | None = None, *, copied: bool = False) -> None:
        self._stored, self._name, self._rows, self._copied = stored, name, rows, copied
        self._lazy = stored.lazy(name)

    def __getitem__(self, at: Any) -> torch.Tensor:
        self._stored.read.append(self._name)
        tensor = self._lazy[...] if self._rows is None else self._lazy[self._rows]
        return (tensor.clone() if self._copied else tensor)[at]

    def get_shape(self) -> list[int]:
        shape = list(self._lazy.get_shape())
        return shape if self._rows is None else [self._rows.stop - self._rows.start, *shape[1:]]

    def get_dtype(self) -> str:
        return str(self._lazy.get_dtype())


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")


def _names(file: Path) -> list[str]:
    return list(_open(file).keys())


def _on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return model_class(config)
    finally:
        torch.set_default_dtype(before)


def _with_few_experts(model_class: Any, count: int) -> Any:
    """A model class whose blocks have room for ``count`` experts, though their routers know all."""

    class WithFewExperts(model_class):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for _, module in experts_modules(self):
                for name in planes_of(module):
                    whole = getattr(module, name)
                    setattr(module, WHOLE, len(whole))
                    setattr(module, name, nn.Parameter(whole.new_empty(count, *whole.shape[1:])))

    WithFewExperts.__name__, WithFewExperts.__qualname__ = model_class.__name__, model_class.__qualname__
    return WithFewExperts


def _dtype(config: Any) -> torch.dtype | None:
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else None


def _take_generation_config(model: Any, path: str | os.PathLike[str]) -> None:
    from transformers import GenerationConfig

    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
