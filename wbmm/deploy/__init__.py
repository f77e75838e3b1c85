"""From a trained model to one that runs: fused, exported, quantised, evaluated, and used on images."""
