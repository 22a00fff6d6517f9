"""Former names, which one more release understands and answers with the present ones."""

import pytest
import torch

import sbkit.codes
import sbkit.infer
from sbkit.system import renamed
from sbkit.train.muon import Muon
from sbkit.train.schedule import Schedule


@pytest.fixture(autouse=True)
def nothing_said_yet():
    renamed.warn_once.cache_clear()


@pytest.mark.parametrize("module, former, present", [
    (sbkit.infer, "Codec", "CodecModel"), (sbkit.infer, "Heard", "StreamResult"),
    (sbkit.codes, "Utterance", "CodedUtterance")])
def test_a_former_name_is_accepted_with_a_warning_that_names_the_new_one(module, former, present):
    with pytest.warns(FutureWarning, match=rf"{module.__name__}\.{former} is now called {present}"):
        assert getattr(module, former) is getattr(module, present)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        module.Nothing  # noqa: B018


def test_an_argument_is_accepted_by_its_former_name_with_one_warning(caplog):
    for _ in range(2):
        schedule = Schedule(0.003, max_rise_per_step=1.0, rise=None, unheard=0.001)
        assert (schedule.max_rise_per_step, schedule.max_lr_at_chance) == (None, 0.001)
    layer = torch.nn.Linear(2, 2)
    [group] = Muon(layer.parameters(), of=[layer], strength=0.1, every=2).param_groups
    assert (group["strength"], group["every"]) == (0.1, 2)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "Muon: every is now called orthogonalize_every", "Muon: of is now called modules",
        "Muon: strength is now called update_rms", "schedule: rise is now called max_rise_per_step",
        "schedule: unheard is now called max_lr_at_chance"]


def test_a_hook_by_its_former_name_is_called(caplog):
    class Base:
        def __init_subclass__(cls):
            renamed.rename_methods(cls, look_at="check_manifest")

        def check_manifest(self):
            return "nothing"

    class Mine(Base):
        def look_at(self):
            return "mine"

    assert Base().check_manifest() == "nothing" and Mine().check_manifest() == "mine"
    assert caplog.messages == ["Mine: the method look_at is now called check_manifest"]
