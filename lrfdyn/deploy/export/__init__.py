"""Models as ONNX, ExecuTorch and NIR files."""
