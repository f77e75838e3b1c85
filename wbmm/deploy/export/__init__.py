"""Model files for other runtimes: ONNX, OpenVINO and torch.export."""

from .pipeline import FORMATS, Exportable, ExportReport, as_exportable, export_model, export_to_file
from .verify import ExportError

__all__ = [
    "FORMATS",
    "ExportError",
    "ExportReport",
    "Exportable",
    "as_exportable",
    "export_model",
    "export_to_file",
]
