# Starts from a short classification run of its own; init=None for none.
_base_ = ["./_base_/upernet_small.py"]

arch = "wbmm_a_dense"
init = "runs/tiny50/wbmm_a_dense/best.pt"
