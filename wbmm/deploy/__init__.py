"""From a trained model to one that runs: fusion."""
