"""graphport: a PyTorch transformer on ONNX Runtime, with proof that it is still the same model."""

__version__ = "0.1.0"
