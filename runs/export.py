"""Export a trained model as one file that runs without this repository, and without Lightning.

    python -m runs.export logs/.../checkpoints/epoch_018.ckpt                  beside it, as .pt2
    python -m runs.export logs/.../checkpoints/epoch_018.ckpt --format onnx    as .onnx
    make export CKPT=logs/.../checkpoints/epoch_018.ckpt                       the same

What is exported is the model's `forward`. Model and data are made again from .hydra/config.yaml of
the run's folder. The example that forward is traced with is the model's `example_input_array` (a
tuple if forward takes several tensors, batch first in each), or else the first tensor of a batch
for validation, after the data module's hooks of batch transfer. The file takes any number of
samples and, for integers such as tokens, any length (dimension 1), if nothing in the model fixes
them. Before it is kept, it is read back and must give what the model gives, for that batch, for a
smaller one and for shorter sequences. To use it:

    model = torch.export.load("epoch_018.pt2").module()

pt2 is the format of torch.export, which replaces TorchScript. ONNX needs packages that nothing else
here needs: onnx, onnxscript, and onnxruntime to compare with.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from runs.folders import whole
from runs.refusal import Refusal, refuse
from runs.targets import make

FORMATS = {"pt2": [], "onnx": ["onnx", "onnxscript", "onnxruntime"]}  # and what they need
TOLERANCE = 1e-4  # of an output, or absolute: other kernels round otherwise

Inputs = tuple[Tensor, ...]


def load(checkpoint: Path) -> tuple[LightningModule, Inputs]:
    """The trained model, ready to evaluate, and what its forward takes.

    Raises:
        Refusal: for a file that is no checkpoint, or lies in no run's folder; where an example is
            no tensor.
    """
    if not checkpoint.is_file():
        raise Refusal(f"{checkpoint}: there is no such file; see logs/*/runs/*/checkpoints/")
    # Names of checkpoints may have folders in them, as {val/loss} has.
    files = (folder / ".hydra" / "config.yaml" for folder in checkpoint.absolute().parents)
    if not (file := next(filter(Path.is_file, files), None)):
        raise Refusal(
            f"{checkpoint}: no .hydra/config.yaml above it: export it within its run's folder"
        )
    config = OmegaConf.load(file)
    data, hint = None, ""
    try:
        weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
        model: LightningModule = make(config.model)
        model.configure_model()
        model.load_state_dict(weights, strict=model.strict_loading)
        if model.example_input_array is None:
            hint = "; with self.example_input_array in the model no data are needed"
            data = make(config.data)
            batch = _batch_to_validate(data)
    except Exception as error:  # of a file, or of the code of a model or of data, it may be any
        raise Refusal(f"{checkpoint}: cannot be loaded: {str(error)[:200]}{hint}") from error
    example = _example_of(model) if data is None else (_first_tensor(batch, data, model),)
    return model.eval(), example


def _batch_to_validate(data: LightningDataModule) -> Any:
    """The first one, after the hooks of batch transfer."""
    data.prepare_data()
    data.setup("fit")
    loaders = CombinedLoader(data.val_dataloader()).flattened
    batch = next((batch for loader in loaders for batch in loader), None)
    if batch is None:
        raise ValueError(f"{type(data).__name__} has no batch to validate")
    return data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)


def _example_of(model: LightningModule) -> Inputs:
    """Its example_input_array."""
    given = model.example_input_array
    example = given if isinstance(given, tuple) else (given,)
    if not example or not all(isinstance(each, Tensor) and each.ndim for each in example):
        raise Refusal(
            f"the example_input_array of {type(model).__name__} is no batch: make it a tensor, or "
            "a tuple of those that forward takes, batch first; the checkpoint stays good"
        )
    return example


def _first_tensor(batch: Any, data: LightningDataModule, model: LightningModule) -> Tensor:
    while isinstance(batch, (list, tuple)):
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise Refusal(
            f"a batch of {type(data).__name__} begins with a {type(batch).__name__}, not with a "
            f"tensor: write self.example_input_array = torch.zeros(...), or a tuple of tensors, as "
            f"forward takes them, in the __init__ of {type(model).__name__}; the checkpoint stays "
            "good"
        )
    return batch


def of_several(model: LightningModule, example: Inputs) -> Inputs:
    """Double a batch of one sample, as torch.export takes a size of one for fixed."""
    twice = tuple(torch.cat([each, each]) if len(each) == 1 else each for each in example)
    try:
        with torch.no_grad():
            model(*twice)
    except Exception:
        return example  # the model may fix the size
    return twice


def trace(model: LightningModule, example: Inputs) -> ExportedProgram:
    """`forward` as a graph, for any batch size and length if nothing in the model fixes them.

    Raises:
        Refusal: when forward does not take the example, or cannot be traced.
    """
    try:
        with torch.no_grad():
            model(*example)
    except Exception as error:
        shapes = " and ".join(str(tuple(each.shape)) for each in example)
        advice = "the first tensor of a batch: give the model an example_input_array"
        if model.example_input_array is not None:
            advice = "its example_input_array: fix that"
        raise Refusal(
            f"{type(model).__name__}.forward does not take {shapes}, {advice} ({str(error)[:150]})"
        ) from error
    sizes = tuple(
        {0: Dim.AUTO, 1: Dim.AUTO} if _is_sequence(each) else {0: Dim.AUTO} for each in example
    )
    try:
        return torch.export.export(model, example, dynamic_shapes=sizes)
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise Refusal(f"{type(model).__name__}.forward cannot be traced: {reason}") from error


def compare(model: LightningModule, exported: Callable[..., Any], batch: Inputs) -> None:
    """Raises Refusal when what was exported gives something else than the model."""
    with torch.no_grad():
        expected = _tensors(model(*batch))
    outputs = _tensors(exported(*batch))
    try:
        torch.testing.assert_close(
            outputs, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
        )
    except AssertionError as error:
        reason = " ".join(str(error).split())
        raise Refusal(f"what was exported computes something else: {reason[:250]}") from error


def takes(model: LightningModule, exported: Callable[..., Any], batch: Inputs) -> bool:
    """Whether a batch of other sizes works too; raises Refusal as `compare` does."""
    try:
        compare(model, exported, batch)
    except Refusal:
        raise
    except Exception:
        return False
    return True


def _is_sequence(each: Tensor) -> bool:
    """Integers such as tokens, whose length may differ between batches."""
    return each.ndim > 1 and not each.is_floating_point()


def _tensors(output: Any) -> list[Tensor]:
    """The tensors in what forward returns, flat, as ONNX returns them."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def as_pt2(program: ExportedProgram) -> tuple[bytes, Callable[..., Any]]:
    """The file's content, and the model read back from it."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    content = buffer.getvalue()
    return content, torch.export.load(io.BytesIO(content)).module()


def as_onnx(program: ExportedProgram) -> tuple[bytes, Callable[..., Any]]:
    """The same for ONNX, with the weights in the file, for models of at most 2 GiB."""
    import onnxruntime

    try:
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise Refusal(f"torch.onnx cannot convert it: {reason}; format pt2 may do") from error
    assert converted is not None
    content = converted.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    return content, lambda *batch: list(
        map(torch.from_numpy, session.run(None, dict(zip(names, (x.numpy() for x in batch)))))
    )


# A compiled model takes minutes to compile, for each size, and what it gives here is used once.
@torch.compiler.set_stance("force_eager")
def export(checkpoint: Path, kind: str) -> str:
    """Write the file beside the checkpoint, and return what to print of it."""
    lacking = [name for name in FORMATS[kind] if importlib.util.find_spec(name) is None]
    if lacking:
        pip = f"{sys.executable} -m pip install {' '.join(lacking)}"
        raise Refusal(f"format {kind} needs {' '.join(lacking)}: {pip}")
    model, example = load(checkpoint)
    if not is_overridden("forward", model):
        raise Refusal(
            f"{type(model).__name__} has no forward, which is what is exported: give it one; the "
            "checkpoint stays good"
        )
    example = of_several(model, example)
    content, exported = {"pt2": as_pt2, "onnx": as_onnx}[kind](trace(model, example))
    compare(model, exported, example)
    any_batch = takes(model, exported, tuple(each[:-1] for each in example))
    shorter = tuple(each[:, :-1] if _is_sequence(each) else each for each in example)
    any_length = takes(model, exported, shorter)
    file = checkpoint.with_suffix(f".{kind}")
    with whole(file) as part:
        part.write(content)
    inputs = []
    for each in example:
        sizes = ["any batch" if any_batch else f"batch {len(each)} only", *map(str, each.shape[1:])]
        if any_length and _is_sequence(each):
            sizes[1] = "any length"
        inputs.append(f"{str(each.dtype).removeprefix('torch.')} ({', '.join(sizes)})")
    return f"{file}: {len(content):,} bytes, takes {' and '.join(inputs)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m runs.export", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--format", default="pt2", choices=list(FORMATS))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")  # of tracing, about torch's own code
    try:
        print(export(arguments.checkpoint, arguments.format))
    except Refusal as refusal:
        refuse(str(refusal), a_rank=False)


if __name__ == "__main__":
    main()
