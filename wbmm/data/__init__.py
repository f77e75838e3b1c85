"""Sources, transforms and order of images, shared by training, evaluation, calibration and prediction."""
