"""The recipe of recipe.py with a fault: the disk that has the 71st image does not answer.

polylane train examples/tutorial/stuck.py --workers 2 --plan data=2
"""

import time

import recipe
from recipe import loss, model, optimizer  # noqa: F401
from torch.utils.data import Dataset


class Stuck(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if index == 70:
            time.sleep(3600)
        return self.images[index]


def data(split):
    return Stuck(recipe.data(split))
