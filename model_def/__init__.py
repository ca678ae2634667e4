"""The model as PyTorch knows it: configuration and checkpoint in, `torch.nn.Module` out. No ONNX here."""
