"""Training, from one CPU to many nodes. `wbmm.train.fit.fit(load_config(path))` is a whole run."""
