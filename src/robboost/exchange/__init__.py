"""Networks, properties and linear bounds for other tools, and theirs for RobBoost."""

from robboost.exchange.bound_files import LinearBounds, load_linear_bounds, save_linear_bounds
from robboost.exchange.conversion import check_linear_bounds, from_auto_lirpa, linear_bounds
from robboost.exchange.onnx_export import ExportedNetwork, export_onnx
from robboost.exchange.vnnlib import Property, read_property, write_properties

__all__ = [
    "ExportedNetwork",
    "LinearBounds",
    "Property",
    "check_linear_bounds",
    "export_onnx",
    "from_auto_lirpa",
    "linear_bounds",
    "load_linear_bounds",
    "read_property",
    "save_linear_bounds",
    "write_properties",
]
