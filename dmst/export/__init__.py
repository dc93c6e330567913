"""A trained network as one file for other software: ONNX, an exported program of torch, or compiled ahead of time.

dmst.export_model(model, "model.onnx")         files.py
read_onnx("model.onnx")                        onnx_network.py
"""
