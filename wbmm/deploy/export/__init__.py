"""Model files for other runtimes: ONNX, OpenVINO and torch.export."""

from .pipeline import FORMATS, Exportable, Report, export_model, export_source, source_of
from .verify import ExportError

__all__ = ["FORMATS", "ExportError", "Exportable", "Report", "export_model", "export_source", "source_of"]
