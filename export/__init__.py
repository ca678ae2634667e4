"""Torch module in, bundle out: ONNX export, graph passes, parity evidence."""

from graphport.export.bundle import Bundle
from graphport.export.model_export import export

__all__ = ["Bundle", "export"]
