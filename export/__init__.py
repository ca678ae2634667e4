"""Torch module in, bundle out: ONNX export, graph passes, parity evidence."""
