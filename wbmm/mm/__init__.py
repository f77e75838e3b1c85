"""WBMM in MMSegmentation and MMDetection: the backbone, layer decay, and training and testing with mmengine.

Importing this package imports no mm*; `wbmm.mm.register` makes everything known to mmengine, and the configurations ask
for it with `custom_imports`.
"""
