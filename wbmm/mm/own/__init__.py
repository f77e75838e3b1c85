"""Data of one's own: what is in a folder, and a configuration for it.

`seg` and `det` are `wbmm train-seg` and `wbmm train-det`, `config` is what they share, and `masks` looks at folders of
images with masks. None of them needs an mm package before training starts.
"""
