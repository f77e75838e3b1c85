# timm's ConvNeXt of about the same size, from a classification run of its own.
_base_ = ["./_base_/upernet_small.py"]

arch = "convnext_atto"
init = "runs/tiny50/convnext_atto/best.pt"
