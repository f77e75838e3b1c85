"""Deterministic order: which sample goes where, and the random numbers of each sample, from a hash of integers.

Nothing here keeps a state. A random number is a hash of (seed, what it is for, epoch, index, ...), so it does not
depend on the number of workers or processes, nor on what was drawn before: resuming is starting at a step.
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["Plan", "hash64", "permutation", "uniform"]

# What a random number is for, so that two uses never share one.
ORDER, SAMPLE, MIX, GEOMETRY, COLOUR, ERASE = range(1, 7)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def hash64(*keys) -> np.ndarray:
    """A 64-bit hash of integers and integer arrays, which broadcast against each other (splitmix64, folded)."""
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        key = np.atleast_1d(np.asarray(key)).astype(np.int64).astype(np.uint64)
        state = _scramble((state + _GOLDEN) ^ key)
    return state


def _scramble(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLY[0]
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLY[1]
    return state ^ (state >> np.uint64(31))


def uniform(*keys) -> np.ndarray:
    """Uniform numbers in [0, 1), one for each combination of the keys."""
    return (hash64(*keys) >> np.uint64(11)).astype(np.float64) / 2.0**53


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the samples in an epoch."""
    return np.argsort(hash64(seed, ORDER, epoch, np.arange(size)), kind="stable")


@dataclass(frozen=True)
class Plan:
    """Who reads what: step s of an epoch takes `perm[s * G:(s + 1) * G]`, cut into micro-batches.

    Micro-batch `a` of rank `r` is the slice number `a * world + r`. So 2 processes and 1 process with twice the
    accumulation read the same micro-batches.
    """

    size: int
    seed: int
    batch: int
    world: int = 1
    rank: int = 0
    accumulation: int = 1

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(
                f"the training set has {self.size} images, fewer than one global batch of {self.global_batch}: "
                f"lower global_batch to {self.size} or less"
            )

    @property
    def global_batch(self) -> int:
        return self.batch * self.world * self.accumulation

    @property
    def steps(self) -> int:
        """Optimiser steps in an epoch; the samples of an incomplete last step are left out (others each epoch)."""
        return self.size // self.global_batch

    def batches(self, epoch: int, start_step: int = 0):
        """The index arrays of this rank's micro-batches, in the order in which they are trained on."""
        order = permutation(self.size, self.seed, epoch)
        for step in range(start_step, self.steps):
            for micro in range(self.accumulation):
                start = step * self.global_batch + (micro * self.world + self.rank) * self.batch
                yield order[start : start + self.batch]
