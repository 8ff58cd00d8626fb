"""Models as ONNX and ExecuTorch files."""
