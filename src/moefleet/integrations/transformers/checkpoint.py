"""A checkpoint directory, of which a rank reads everything but the other ranks' experts.

transformers loads it, with its own renamings and conversions; what it gets are the tensors that this rank needs, each
read when its turn comes (``files.py``). Files may keep experts one by one (``...experts.7.up_proj.weight``) or all of
a block in one tensor, of which only this rank's rows are read.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import BootstrapConfig, resolve_device
from ...errors import config_error
from ...placement import Placement
from .experts import WHOLE, experts_modules, find_experts, planes_of
from .files import Tensors, give_back

ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""A variable in transformers' environment: read a tensor when its turn comes, not all at once in threads."""


def load_share(
    path: str | os.PathLike[str], bootstrap: BootstrapConfig, dtype: torch.dtype | None
) -> tuple[Any, tuple[str, ...]]:
    """The model with this rank's experts only, and the names of the tensors that were read.

    Raises:
        MoEEpConfigError: not a directory with an unquantised MoE model in safetensors files, or tensors are missing.
    """
    model_class, config = model_class_of(path)
    num_experts = find_experts(_on_meta(model_class, config, torch.float32))[0].form[0]
    own = Placement.contiguous(num_experts, bootstrap.world_size).experts_of(bootstrap.rank)
    stored = Tensors(Path(path))
    wanted, dtype = stored.wanted(own), dtype or _dtype(config) or stored.dtype()
    with _loading():
        model, info = _with_few_experts(model_class, len(own)).from_pretrained(
            None, config=config, state_dict=wanted, dtype=dtype, output_loading_info=True
        )
    model.__class__ = model_class
    missing = [name for name in info["missing_keys"] if own or ".experts." not in name]
    if missing:
        raise config_error(f"model: {path}", f"no tensors for {sorted(missing)[:4]}", "a complete checkpoint")
    _take_generation_config(model, path)
    return model.to(resolve_device(bootstrap)).eval(), tuple(stored.read)


@contextmanager
def quiet() -> Iterator[None]:
    """transformers loads without progress bars, and says nothing but errors."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _loading() -> Iterator[None]:
    """Quietly, and without holding more than one block's experts twice."""
    before = os.environ.get(ONE_BY_ONE)
    os.environ[ONE_BY_ONE] = "1"
    try:
        with quiet():
            yield
        give_back()
    finally:
        if before is None:
            del os.environ[ONE_BY_ONE]
        else:
            os.environ[ONE_BY_ONE] = before


def meta_model(path: str | os.PathLike[str], dtype: torch.dtype | None) -> nn.Module:
    """The whole model without memory."""
    model_class, config = model_class_of(path)
    model: nn.Module = _on_meta(model_class, config, dtype or _dtype(config) or Tensors(Path(path)).dtype())
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if any(part in name for part in kept):
            tensor.data = tensor.data.float()
    return model


def model_class_of(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """The class that a directory's config names, and the config."""
    import transformers

    if not (Path(path) / "config.json").is_file():
        raise config_error(
            "model",
            f"{os.fspath(path)!r}",
            "a directory with config.json and safetensors files",
            "bring a model of a hub into one: hf download NAME --local-dir FOLDER",
        )
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
    WithFewExperts.__module__ = model_class.__module__  # transformers looks into its source
    return WithFewExperts


def _dtype(config: Any) -> torch.dtype | None:
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else None


def _take_generation_config(model: Any, path: str | os.PathLike[str]) -> None:
    from transformers import GenerationConfig

    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
