"""Networks, properties and linear bounds for other tools, and theirs for RobBoost."""

from robboost.exchange.onnx_export import ExportedNetwork, export_onnx

__all__ = ["ExportedNetwork", "export_onnx"]
