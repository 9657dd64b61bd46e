"""Data sets: official files from a data directory or by checked download, an embedded MNIST subset, and .npz files."""

from __future__ import annotations

from robboost.data.dataset import Dataset
from robboost.data.files import data_directory
from robboost.data.loading import DATASETS, SPLITS, load_dataset

__all__ = ["DATASETS", "SPLITS", "Dataset", "data_directory", "load_dataset"]
