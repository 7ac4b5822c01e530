"""The picture of docs/masks.md is what the library computes."""

from tests.makers import mask_picture
from tests.support import slow


@slow
def test_the_picture_of_masks_follows_the_code():
    assert mask_picture.PICTURE.read_text() == mask_picture.picture(), (
        "run python -m tests.makers mask_picture"
    )
