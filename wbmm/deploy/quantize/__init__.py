"""Models in fewer bits: INT8 by the runtimes' own tools, with the layers that hurt kept in float, and FP16."""
