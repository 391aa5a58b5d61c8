"""Positions on three axes, against Transformers' own where it is right, and written out where it is not."""

import numpy as np
import pytest
import torch

from tests.support.models.seeing_models import IMAGE, SEEING, seeing_model
from twinkle.images import position_axes


@pytest.mark.parametrize("family", SEEING)
def test_as_transformers_has_them(family: str) -> None:
    model = seeing_model(family).model
    images = [(2, 3, 2), (12, 1, 5), (20, 4, 4)]
    types = np.zeros(40, np.int64)
    for first, rows, columns in images:
        types[first : first + rows * columns] = 1
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for _, rows, columns in images])
    ids = torch.where(torch.from_numpy(types) == 1, IMAGE, 5)[None]
    theirs, _ = model.get_rope_index(ids, mm_token_type_ids=torch.from_numpy(types)[None], image_grid_thw=grids)
    np.testing.assert_array_equal(position_axes(40, images), theirs[:, 0].numpy())


def test_two_images_in_a_row() -> None:
    axes = position_axes(8, [(1, 1, 2), (3, 2, 1)])
    assert axes.T.tolist() == [
        [0, 0, 0],
        *([1, 1, 1], [1, 1, 2]),
        *([3, 3, 3], [3, 4, 3]),
        *([5, 5, 5], [6, 6, 6], [7, 7, 7]),
    ]


def test_text_alone_and_an_image_at_the_end() -> None:
    assert position_axes(3, []).tolist() == [[0, 1, 2]] * 3
    assert position_axes(2, [(0, 2, 1)]).tolist() == [[0, 0], [0, 1], [0, 0]]
