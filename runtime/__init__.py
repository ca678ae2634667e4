"""Bundle in, tokens out, on ONNX Runtime. Nothing here imports torch or onnx."""
