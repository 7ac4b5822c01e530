"""The prompts of the models, which need not be stored."""

import numpy as np

VOCABULARY, LENGTHS = 44, (9, 6, 3)
IMAGE, PATCH_DIM, MERGE = 40, 16, 2
# Frames, rows and columns of the images of each row, in patches; four are a token.
GRIDS = (((1, 4, 6),), ((1, 4, 4), (1, 2, 2)), ())


def prompts(seed=0):
    """Tokens [B, T], padded on the left with 0, and their mask."""
    draws = np.random.RandomState(seed)
    length = max(LENGTHS)
    tokens = draws.randint(1, VOCABULARY, (len(LENGTHS), length))
    mask = np.arange(length) >= length - np.array(LENGTHS)[:, None]
    return tokens * mask, mask


def images(seed=0):
    """Tokens with images, their mask, the patches of all images, and the grids of each row."""
    draws = np.random.RandomState(seed)
    rows = []
    for grids in GRIDS:
        row = [*draws.randint(1, IMAGE, 2)]
        for time, height, width in grids:
            row += [IMAGE] * (time * height * width // MERGE**2) + [*draws.randint(1, IMAGE, 2)]
        rows.append(np.array(row))
    length = max(map(len, rows))
    tokens = np.stack([np.pad(row, (length - len(row), 0)) for row in rows])
    count = sum(np.prod(grid) for grids in GRIDS for grid in grids)
    patches = draws.standard_normal((count, PATCH_DIM)).astype(np.float32)
    return tokens, tokens > 0, patches, GRIDS


def pictures(seed=0):
    """Pictures [B, rows, columns, channels]."""
    return np.random.RandomState(seed).standard_normal((2, 24, 24, 3))
