"""Images in.

images.py     the one door for image bytes            sets.py, formats/   a split of a dataset, read from its own layout
catalog.py    the datasets by name                     fetch.py, scan.py   getting them, and looking at every image once
chance.py     randomness by (seed, epoch, image)       order.py            which images, in which order
loader.py     batches, by two paths: resident.py (on the device), workers.py (large images)
batching.py   one pure function from pixels to a batch: geometry, color, rand_augment, erasing, mixing
"""
