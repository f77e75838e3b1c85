"""No reports to anybody about what is run here."""

import sys

__all__ = ["silence_telemetry"]


def silence_telemetry() -> None:
    """Keeps OpenVINO and NNCF from reporting their use to their makers, in this process.

    They do so by default from the moment they are imported, through the package `openvino_telemetry`, and take a stub
    where it cannot be imported: so it cannot. Nothing is written to the user's folder, where their own switch is.
    """
    loaded = sys.modules.setdefault("openvino_telemetry", None)
    if loaded is not None:  # OpenVINO was imported by somebody else, and has started to report
        loaded.main.TelemetrySender.send = lambda *_: None
