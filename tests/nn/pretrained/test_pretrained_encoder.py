"""Every family says of an utterance what transformers says of it alone, in any batch; and how it trains."""

import dataclasses
import json

import encoders
import pytest
import torch
from refusals import refused

from sbkit.nn.pretrained import Encoder, Head, networks
from sbkit.nn.pretrained.source import Settings

pytestmark = pytest.mark.slow  # each takes a fraction of a second, and there are many

SAMPLES = (16_000, 400, 12_345, 7_999, 721, 16_001)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each kind's folder, made when it is asked for."""
    home, made = tmp_path_factory.mktemp("encoders"), {}

    def folder(kind):
        if kind not in made:
            made[kind] = encoders.make(home / kind, kind)
        return made[kind]

    return folder


def loaded(folder, **options):
    encoder = Encoder(str(folder), **options)
    encoder.load()
    return encoder.eval()


def waves(samples, seed=0):
    """Noise whose loudness differs and that is not symmetric, and what is behind the utterances is not zero."""
    drawn = torch.Generator().manual_seed(seed)
    signals = torch.randn(len(samples), max(samples), generator=drawn)
    return signals * (0.05 + torch.rand(len(samples), 1, generator=drawn)) + 0.1, torch.tensor(samples)


def silenced(signals, samples):
    return signals.masked_fill(torch.arange(signals.shape[1]) >= samples[:, None], 0.0)


@pytest.mark.parametrize("kind", encoders.KINDS)
def test_alone_it_is_what_transformers_says(folders, kind):
    """Whisper's in a window of 30 seconds, of which that makes states of silence, too."""
    encoder = loaded(folders(kind), whole_window=True)
    for samples in (16_000, 12_345, 721):
        signals, counts = waves([samples], seed=samples)
        with torch.no_grad():
            found = encoder(signals, counts)[0]
        least = encoder.network.min_samples if kind == "lasr" else 0  # transformers' own takes no shorter ones
        given = torch.nn.functional.pad(signals[0], (0, max(0, least - samples)))
        expected = encoders.theirs(folders(kind), kind, given)[:encoder.frames(samples)]
        assert found.shape == expected.shape == (encoder.frames(samples), encoder.width)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [0, 5_000])
@pytest.mark.parametrize("kind, window", [*((kind, False) for kind in encoders.KINDS), ("whisper", True)])
def test_an_utterance_is_the_same_alone_and_in_any_batch(folders, kind, window, more):
    encoder = loaded(folders(kind), whole_window=window)
    head = Head(encoder, 30, kernel_size=5).eval()
    signals, counts = waves(SAMPLES)
    batch = torch.nn.functional.pad(silenced(signals, counts), (0, more))
    with torch.no_grad():
        together = head(encoder(batch, counts)).log_softmax(-1)
        for row, samples in enumerate(SAMPLES):
            alone = head(encoder(signals[row:row + 1, :samples], counts[row:row + 1])).log_softmax(-1)
            frames = encoder.frames(samples)
            assert int(encoder.frames(counts)[row]) == frames <= alone.shape[1]
            torch.testing.assert_close(together[row, :frames], alone[0, :frames], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernel", [-1, 4])
def test_a_head_sees_as_many_states_before_a_frame_as_after(folders, kernel):
    with refused("bad-value") as raised:
        Head(Encoder(str(folders("whisper"))), 30, kernel_size=kernel)
    assert "odd number" in raised.value.hint


@pytest.mark.parametrize("kind, least, two", [("wav2vec2-layer", 400, 720), ("w2v-bert", 560, 880),
                                              ("whisper", 1, 321)])
def test_what_is_shorter_than_a_frame_is_one(folders, kind, least, two):
    encoder = loaded(folders(kind))
    assert encoder.frames(0) == encoder.frames(least) == encoder.frames(two - 1) == 1 and encoder.frames(two) == 2
    with torch.no_grad():
        assert encoder(torch.randn(1, 30), torch.tensor([30])).isfinite().all()
        assert encoder(torch.randn(2, 900), torch.tensor([900, 0])).isfinite().all()


def test_waveforms_are_made_equally_loud_where_the_model_was_used_to_it(tmp_path):
    encoders.make(tmp_path / "group", "wav2vec2-group", normalizes=True)
    encoders.make(tmp_path / "layer", "wav2vec2-layer", normalizes=False)
    assert loaded(tmp_path / "group").normalizes_loudness and not loaded(tmp_path / "layer").normalizes_loudness
    for kind in ("layer", "group"):  # as the processors of transformers 5 save theirs
        own = tmp_path / kind / "preprocessor_config.json"
        whole = {"feature_extractor": json.loads(own.read_text())}
        (own.parent / "processor_config.json").write_text(json.dumps(whole))
        own.unlink()
    assert loaded(tmp_path / "group").normalizes_loudness and not loaded(tmp_path / "layer").normalizes_loudness
    (tmp_path / "layer" / "processor_config.json").unlink()
    (tmp_path / "group" / "processor_config.json").unlink()
    assert loaded(tmp_path / "layer").normalizes_loudness and not loaded(tmp_path / "group").normalizes_loudness


@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("kind", encoders.KINDS)
def test_every_parameter_but_the_frozen_ones_learns_in_each_step(folders, kind, freezes):
    """Those that get no gradient would have DDP wait for them."""
    encoder = loaded(folders(kind), mask_time_prob=0.3, mask_feature_prob=0.1, freeze_front=freezes).train()
    parameters = [p for name in encoder.network.front for p in encoder.network.get_submodule(name).parameters()]
    front = set(map(id, parameters)) if freezes else set()
    signals, counts = waves(SAMPLES)
    for _ in range(3):
        encoder.zero_grad(set_to_none=True)
        encoder(silenced(signals, counts), counts).square().sum().backward()
        without = {name for name, p in encoder.named_parameters() if p.grad is None}
        assert without == {name for name, p in encoder.named_parameters()
                           if id(p) in front or "embed_positions" in name}, "its places were never trained"
    assert bool(front) == (freezes and kind != "w2v-bert")
    assert bool(parameters) == bool(encoder.network.front) and all(p.requires_grad != freezes for p in parameters)


def test_the_same_generator_masks_the_same_spans(folders):
    encoder = loaded(folders("wav2vec2-layer"), dropout=0.0, mask_time_prob=0.5, mask_feature_prob=0.2).train()
    signals, counts = waves([16_000, 9_000, 400])

    def once(seed):
        torch.manual_seed(seed)
        return encoder(silenced(signals, counts), counts)

    torch.testing.assert_close(once(1), once(1), rtol=0, atol=0)
    assert not torch.allclose(once(1), once(2))


def test_activations_may_be_computed_again(folders):
    from sbkit.train.recomputing import checkpoint_activations

    signals, counts = waves([8_000, 5_000])
    gradients = []
    for again in (False, True):
        encoder = loaded(folders("wavlm-group"), dropout=0.1).train()
        if again:
            checkpoint_activations(encoder, ["GradientCheckpointingLayer"])
        torch.manual_seed(3)
        encoder(silenced(signals, counts), counts).square().sum().backward()
        gradients.append({name: p.grad for name, p in encoder.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=0, atol=0)


@pytest.mark.parametrize("kind", encoders.KINDS)
def test_in_bf16_it_says_much_the_same(folders, kind):
    encoder = loaded(folders(kind), mask_time_prob=0.0, mask_feature_prob=0.0, dropout=0.0).train()
    signals, counts = waves([8_000, 5_000])
    with torch.autocast("cpu", torch.bfloat16):
        half = encoder(silenced(signals, counts), counts)
        half.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)
    encoder.eval()
    with torch.no_grad():
        whole = encoder(silenced(signals, counts), counts)
        with torch.autocast("cpu", torch.bfloat16):
            half = encoder(silenced(signals, counts), counts)
    for row, frames in enumerate(encoder.frames(counts)):
        error = (half[row, :frames].float() - whole[row, :frames]).square().mean().sqrt()
        assert error < 0.05 * whole[row, :frames].std()


def test_the_lowest_layers_may_be_taken_alone(folders):
    encoder = loaded(folders("hubert-layer"), layers=1)
    assert len(encoder.network.encoder.layers) == 1
    with refused("bad-value"):
        Encoder(str(folders("hubert-layer")), layers=3)


def test_dropout_is_the_recipes_where_it_says_one(folders):
    def shares(**options):
        encoder = Encoder(str(folders("wav2vec2-layer")), **options)
        return {module.p for module in encoder.modules() if isinstance(module, torch.nn.Dropout)} \
            | {encoder.network.encoder.layers[0].attention.dropout}

    assert shares(dropout=0.25) == {0.25} and shares() != {0.25}


def test_whispers_encoder_says_what_it_can_not_hear(folders):
    encoder = loaded(folders("whisper"))
    encoder(torch.zeros(1, 480_000), torch.tensor([480_000]))
    with refused("clip-too-long"):
        encoder(torch.zeros(1, 500_000), torch.tensor([496_000]))


@pytest.mark.parametrize("whole", [True, False])
def test_padding_beyond_whispers_window_is_no_utterance(folders, whole):
    """Batches are padded to lengths that recur, also those of nearly 30 seconds."""
    encoder = loaded(folders("whisper"), whole_window=whole)
    signals, counts = waves([480_000])
    with torch.no_grad():
        plain = encoder(signals, counts)
        padded = encoder(torch.nn.functional.pad(signals, (0, 5_120)), counts)
    assert plain.shape[1] == 1_500 and torch.equal(padded, plain)


@pytest.mark.parametrize("kind", encoders.KINDS)
def test_an_encoder_differs_from_its_like_in_what_its_weights_mean_alone(folders, tmp_path, kind):
    folder = folders(kind)
    here = Settings.of(str(folder))
    free = {"dropout": 0.4, "hidden_dropout": 0.4, "vocab_size": 99, "_name_or_path": "x", "mask_time_prob": 0.7}
    assert networks.differences(here, dataclasses.replace(here, source="x", config={**here.config, **free})) == []
    width = "d_model" if kind == "whisper" else "hidden_size"
    assert networks.differences(here, dataclasses.replace(here, config={**here.config, width: 64})) == \
        [f"{width}: 64 there, 32 here"]
    (short,) = networks.differences(here, Settings.of(str(folders("whisper" if kind != "whisper" else "w2v-bert"))))[:1]
    assert short.startswith("model_type: ")


def test_whether_loudness_is_made_equal_is_part_of_what_weights_mean(folders):
    here = Settings.of(str(folders("wav2vec2-layer")))
    assert networks.differences(here, dataclasses.replace(here, preprocessor={})) == []  # as its norm says
    assert networks.differences(here, dataclasses.replace(here, preprocessor={"do_normalize": False})) == \
        ["do_normalize: False there, True here"]


def test_it_knows_what_its_source_lacks(tmp_path):
    folder = encoders.make(tmp_path, "wav2vec2-layer")
    assert Encoder(str(folder), mask_time_prob=0.1).reinitialised == set()
    assert "network.masked_spec_embed" not in Encoder(str(folder), mask_time_prob=0.0).state_dict(), "nothing is masked"
    tensors = {name: value for name, value in encoders.start(folder, "wav2vec2-layer").items()
               if name != "masked_spec_embed"}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert Encoder(str(folder), mask_time_prob=0.1).reinitialised == {"network.masked_spec_embed"}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["wav2vec2-layer", "hubert-batch-norm"])
def test_on_a_card_positions_are_convolved_in_fp32_within_autocast(folders, kind):
    encoder = loaded(folders(kind)).to("cuda")
    seen = []
    encoder.network.encoder.pos_conv_embed.conv.register_forward_hook(
        lambda module, given, found: seen.append((given[0].dtype, found.dtype)))
    signals, counts = waves(SAMPLES)
    with torch.autocast("cuda", torch.bfloat16):
        encoder(signals.cuda(), counts.cuda())[0].float().sum().backward()
    assert seen == [(torch.float32, torch.float32)]
    assert all(p.grad is not None for p in encoder.network.encoder.pos_conv_embed.conv.parameters())
