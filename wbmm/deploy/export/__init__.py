"""Model files for other runtimes: ONNX, OpenVINO and torch.export."""

from .pipeline import FORMATS, Report, Source, export_model, export_source, source_of
from .verify import ExportError

__all__ = ["FORMATS", "ExportError", "Report", "Source", "export_model", "export_source", "source_of"]
