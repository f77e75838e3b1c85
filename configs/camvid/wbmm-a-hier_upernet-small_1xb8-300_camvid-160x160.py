# Starts from the 7x7 weights, with their tables interpolated to the larger windows.
_base_ = ["./_base_/upernet_small.py"]

arch = "wbmm_a_hier"
init, resize_tables = "runs/tiny50/wbmm_a_dense/best.pt", True
