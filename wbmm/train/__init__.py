"""Training, from one CPU to many nodes. `wbmm.train.run.fit(load_config(path))` is a whole run."""
