"""The paper's tables as data, and what is measured of each row."""

from .rows import Row, Table, get_table, load_tables

__all__ = ["Row", "Table", "get_table", "load_tables"]
