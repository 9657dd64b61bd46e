"""The paper's numbers as data: what its text says about them must hold of them."""

import pytest

from robboost.errors import InputError
from robboost.models.architectures import PAPER_MNIST, build, float32_bytes
from robboost.reproduce.paper import BOOSTED, ELIMINATED, MAIN, SUBSAMPLED
from robboost.reproduce.settings import SETTINGS, chosen_settings, setting_of


def test_every_table_speaks_of_known_settings():
    assert set(MAIN) == set(ELIMINATED) == set(SETTINGS)
    assert set(SUBSAMPLED) == set(BOOSTED) == {"mnist-0.3", "cifar10-2-255"}


@pytest.mark.parametrize("setting", MAIN)
def test_main_table(setting):
    uniform, ours = MAIN[setting]["uniform"], MAIN[setting]["RobBoost"]
    assert ours.verified_test < uniform.verified_test  # "consistently outperforms naive averaging"
    assert ours.verified_train < uniform.verified_train
    assert ours.megabytes < uniform.megabytes
    for row in (uniform, ours):
        assert row.clean <= row.pgd <= row.verified_test
        for share in (row.clean, row.pgd):  # errors of 256 images
            assert share * 256 / 100 == pytest.approx(round(share * 256 / 100), abs=0.013)


def test_table_1_cannot_count_images():
    """More robust to all members than the average certifies: so it counts pairs."""
    assert ELIMINATED["mnist-0.1"].robust_to_all > 100 - MAIN["mnist-0.1"]["uniform"].verified_train
    for row in ELIMINATED.values():
        assert 70 <= row.robust_to_all + row.robust_to_none <= 98 or row is ELIMINATED["cifar10-2-255"]


def test_table_3_and_the_sizes():
    for row in SUBSAMPLED.values():
        assert len(row.clean) == len(row.verified) == 7
        assert all(clean < verified for clean, verified in zip(row.clean, row.verified, strict=True))
    total = sum(float32_bytes(build(name, (1, 28, 28))) for name in PAPER_MNIST)
    assert total / 2**20 == pytest.approx(MAIN["mnist-0.1"]["uniform"].megabytes, abs=0.1)


def test_settings():
    assert [setting.name for setting in chosen_settings(())] == list(SETTINGS)
    assert str(SETTINGS["cifar10-8-255"].threat) == "linf 8/255 within [0, 1]"
    assert setting_of("boost-mnist-0.3") is SETTINGS["mnist-0.3"]
    assert setting_of("something") is None
    with pytest.raises(InputError, match=r"setting 'mnist-9': expected one of mnist-0\.1"):
        chosen_settings(("mnist-9",))
