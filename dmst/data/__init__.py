"""Images in.

images.py       the one door for image bytes            sets.py, formats/   a split of a dataset, read from its own layout
catalog.py      the datasets by name                    fetch.py, scan.py   getting them, and looking at every image once
loader.py       batches in their order, by two paths: on the device, or cut to size by workers.py (large images)
batching.py     one pure function from pixels to a batch: geometry, rand_augment, mixing
chance.py       randomness by (seed, epoch, image)      augment.py          the settings of a recipe
"""
