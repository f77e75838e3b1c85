"""Data of one's own: what is in a folder, and a configuration for it.

`masks` and `objects` look at folders, `seg` and `det` are `wbmm train-seg` and `wbmm train-det`, `prepare_seg` turns
masks of any kind into label maps. None of them needs an mm package before training starts.
"""
