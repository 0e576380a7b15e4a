"""The picture of a mode report."""

import numpy as np
import pytest
from matplotlib.image import imread

from interdomain_jax.mode_chart import draw_modes
from interdomain_jax.ops import ModeReport


def report(heads):
    """Random numbers in the places of a report of 8 modes and 16 lags."""
    rng = np.random.default_rng(0)
    return ModeReport(
        rng.uniform(1, 1000, (heads, 8)), rng.uniform(-np.pi, np.pi, (heads, 8)), rng.normal(size=(heads, 16, 16))
    )


def test_a_row_of_three_panels_and_a_colour_bar_for_each_head(tmp_path):
    figure = draw_modes(report(4), title="four heads")
    figure.savefig(tmp_path / "modes.png")
    assert len(figure.axes) == 4 * (3 + 1)
    assert imread(tmp_path / "modes.png").std() > 0.1


def test_the_panels_show_the_report():
    modes = report(3)
    dots, kernel, diagonal, _ = draw_modes(modes, title="one head", heads=[2]).axes
    assert dots.get_ylabel() == "head 2"
    np.testing.assert_allclose(
        dots.collections[0].get_offsets(), np.stack([modes.angles[2], modes.timescales[2]], axis=1), rtol=1e-6
    )
    image = kernel.images[0]
    np.testing.assert_allclose(image.get_array(), modes.lag_kernel[2], rtol=1e-6)
    assert image.norm.vmin == -image.norm.vmax < 0
    np.testing.assert_allclose(diagonal.lines[-1].get_ydata(), np.diagonal(modes.lag_kernel[2]), rtol=1e-6)


def test_a_mode_that_does_not_decay_is_drawn_at_the_top():
    modes = report(1)
    modes.timescales[0, 3] = np.inf
    dots = draw_modes(modes, title="endless").axes[0]
    assert [len(each.get_offsets()) for each in dots.collections] == [7, 1]
    np.testing.assert_allclose(dots.collections[1].get_offsets(), [[modes.angles[0, 3], 0.97]], rtol=1e-6)


def test_a_kernel_of_zeros_is_drawn(tmp_path):
    modes = report(1)
    draw_modes(modes._replace(lag_kernel=0 * modes.lag_kernel), title="nothing").savefig(tmp_path / "modes.png")


@pytest.mark.parametrize("heads", [[], [2], [-1, 0]])
def test_heads_that_do_not_exist_are_refused(heads):
    with pytest.raises(ValueError) as caught:
        draw_modes(report(2), title="none", heads=heads)
    assert str(caught.value) == f"heads must be some of 0 to 1; got {heads}."
