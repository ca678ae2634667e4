"""A torch module to an ONNX graph in which every axis that was declared dynamic is dynamic.

In: a module and the specs of its inputs and outputs. Out: an onnx_ir model, opset 23, whose `graphport` nodes carry
function bodies of standard ops. It optimises nothing (see `pipeline.py`) and writes no file (see `bundle.py`).
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping

import onnx_ir as ir
import torch
from torch import nn

from graphport.export.function_bodies import attach_function
from graphport.export.portable_ops import DOMAIN
from graphport.export.translations import TRANSLATIONS
from graphport.model_def.signature import Signature, TensorSpec

OPSET = 23
IR_VERSION = 10

# torch.export reads an example size of 0 or 1 as a constant and equal sizes as one axis, so every symbolic
# dimension gets a size of its own from here, whatever the caller would have chosen.
_EXAMPLE_SIZES = (3, 5, 11, 7, 13, 17, 19, 23)


class ExportError(ValueError):
    """A module that cannot be exported as asked; the message names the axis or op."""


def torch_to_onnx(module: nn.Module, signature: Signature, sizes: Mapping[str, int] | None = None) -> ir.Model:
    """Trace `module`, called with one tensor an input of `signature` in order, to an ONNX model.

    A `str` dimension of an input is dynamic and may be 0, 1 or more at run time; equal names are equal sizes.
    `sizes`: example sizes of dimensions for which not every number will do.
    The module runs in eval mode and has its modes back afterwards. Raises ExportError when an axis declared dynamic
    froze, or when the module cannot be traced.
    """
    chosen = {**_example_sizes(signature.inputs), **(sizes or {})}
    examples = tuple(_example(spec, chosen) for spec in signature.inputs)
    axes = _dynamic_axes(signature.inputs)
    with _in_eval_mode(module), torch.no_grad(), _quiet_exporter():
        try:
            exported = torch.export.export(_Positional(module), examples, dynamic_shapes=(axes,), strict=False)
        # torch 2.13 exports its UserError under no public name
        except (torch._dynamo.exc.UserError, ValueError, RuntimeError) as error:
            raise ExportError(_explain(error, signature.inputs)) from error
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=TRANSLATIONS,
            optimize=False,
            verbose=False,
        )
    if program is None:
        raise ExportError(f"torch.onnx returned no program for {type(module).__name__}")
    model = program.model
    _name_values(model, signature)
    _check_axes(model, signature)
    _attach_functions(model)
    model.ir_version = IR_VERSION
    return model


class _Positional(nn.Module):
    """The module behind one variadic signature, so that any number of inputs has one shape of dynamic_shapes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.module(*inputs)


def _example_sizes(specs: tuple[TensorSpec, ...]) -> dict[str, int]:
    names = dict.fromkeys(dim for spec in specs for dim in spec.shape if isinstance(dim, str))
    if len(names) > len(_EXAMPLE_SIZES):
        raise ExportError(
            f"{len(names)} dynamic dimensions ({', '.join(names)}), at most {len(_EXAMPLE_SIZES)} can be told apart; "
            "give the others a fixed size"
        )
    return dict(zip(names, _EXAMPLE_SIZES, strict=False))


def _example(spec: TensorSpec, sizes: dict[str, int]) -> torch.Tensor:
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    return torch.zeros(shape, dtype=getattr(torch, spec.dtype))


def _dynamic_axes(specs: tuple[TensorSpec, ...]) -> tuple[dict[int, torch.export.Dim], ...]:
    dims = {dim: torch.export.Dim(dim, min=0) for spec in specs for dim in spec.shape if isinstance(dim, str)}
    return tuple({axis: dims[dim] for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in specs)


def _explain(error: Exception, specs: tuple[TensorSpec, ...]) -> str:
    text = " ".join(str(error).split())
    frozen = [
        f"axis {axis} ({dim}) of {spec.name}"
        for spec in specs
        for axis, dim in enumerate(spec.shape)
        if isinstance(dim, str) and (f"{dim} was inferred to be a constant" in text or f"({dim})" in text)
    ]
    if frozen:
        return f"declared dynamic but frozen by the module: {', '.join(frozen)}; torch.export says: {text[:600]}"
    return f"the module cannot be traced by torch.export: {text[:600]}"


def _name_values(model: ir.Model, signature: Signature) -> None:
    """Give graph inputs and outputs the signature's names; an output that is no node's own gets an Identity."""
    graph = model.graph
    if len(graph.inputs) != len(signature.inputs) or len(graph.outputs) != len(signature.outputs):
        raise ExportError(
            f"the module has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs, the signature names "
            f"{len(signature.inputs)} and {len(signature.outputs)}"
        )
    reserved = {spec.name for spec in (*signature.inputs, *signature.outputs)}
    for value in [*graph.initializers.values(), *(out for node in graph for out in node.outputs)]:
        name = (value.name or "").removeprefix("module.").removeprefix("model.")
        value.name = f"{name}.inner" if name in reserved else name
    for value, spec in zip(graph.inputs, signature.inputs, strict=True):
        value.name = spec.name
    taken: set[ir.Value] = set()
    for index, spec in enumerate(signature.outputs):
        value = graph.outputs[index]
        if value.producer() is None or value in taken:
            node = ir.node("Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = value = node.outputs[0]
        taken.add(value)
        value.name = spec.name


def _check_axes(model: ir.Model, signature: Signature) -> None:
    """Compare the graph's axes with the declared ones and give symbolic axes their declared names."""
    frozen = []
    renamed: dict[str, str] = {}
    for value, spec in zip(model.graph.inputs, signature.inputs, strict=True):
        for axis, (found, wanted) in enumerate(zip(value.shape or (), spec.shape, strict=True)):
            if isinstance(wanted, str) and isinstance(found, int):
                frozen.append(f"axis {axis} ({wanted}) of {spec.name} froze at {found}")
            elif isinstance(wanted, str):
                renamed[str(found)] = wanted
    if frozen:
        raise ExportError(f"declared dynamic but frozen by the export: {'; '.join(frozen)}")
    _check_outputs(model, signature, renamed)
    for value in _values(model.graph):
        if value.shape is not None:
            dims = [renamed.get(str(dim), dim) if not isinstance(dim, int) else dim for dim in value.shape]
            value.shape = ir.Shape(dims)


def _check_outputs(model: ir.Model, signature: Signature, renamed: dict[str, str]) -> None:
    """Compare dtypes and axes of the outputs with the declared ones; axes that the trace left open are named."""
    wrong = []
    for value, spec in zip(model.graph.outputs, signature.outputs, strict=True):
        shape = tuple(d if isinstance(d, int) else renamed.get(str(d), d) for d in value.shape or ())
        dtype = "none" if value.dtype is None else str(value.dtype.numpy().name)
        known = set(renamed.values())
        differs = len(shape) != len(spec.shape) or any(
            found != wanted and (isinstance(found, int) or found in known)
            for found, wanted in zip(shape, spec.shape, strict=False)
        )
        if dtype != spec.dtype or differs:
            axes = ", ".join(map(str, shape))
            wrong.append(f"{spec.name} is {dtype} [{axes}], declared {spec.dtype} {list(spec.shape)}")
        else:
            value.shape = ir.Shape(spec.shape)
    if wrong:
        raise ExportError(f"outputs differ from their declaration: {'; '.join(wrong)}; correct the signature or module")


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _attach_functions(model: ir.Model) -> None:
    """Add the bodies of the `graphport` ops in use."""
    for name in {node.op_type for node in model.graph if node.domain == DOMAIN}:
        attach_function(model, name)


@contextlib.contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hold back torch.onnx's remarks on optional packages and its own deprecations (torch 2.13)."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(level)
