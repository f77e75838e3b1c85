# Starts from the 7x7 weights, with their tables interpolated to the larger windows.
_base_ = ["./_base_/upernet_small.py"]

arch = "wbmm_a_hier"
init_cfg = dict(type="Pretrained", checkpoint="runs/tiny50/wbmm_a_dense/best.pt", resize_tables=True)
