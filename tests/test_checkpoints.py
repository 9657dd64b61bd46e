"""Saving and loading networks and ensembles; public checkpoint layouts; wrong and damaged files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from robboost.errors import CheckpointError, InputError, RobBoostError, UnsupportedOperationError
from robboost.models import (
    Ensemble,
    Normalize,
    PixelMask,
    load_model,
    load_models,
    read_metadata,
    save_model,
)
from robboost.models.architectures import ARCHITECTURES, build
from robboost.models.wiring import WiredNetwork

MNIST, CIFAR, TINY = (1, 28, 28), (3, 32, 32), (1, 8, 8)


def images(shape, n=3):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


def same(first, second, shape):
    return torch.equal(first.eval()(images(shape)), second(images(shape)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_comes_back_exactly(name, tmp_path):
    model = build(name, CIFAR, seed=1, batch_norm=name in "AK")
    save_model(model, tmp_path / "m.safetensors", {"architecture": name, "seed": 1}, input_shape=CIFAR)
    loaded = load_model(tmp_path / "m.safetensors")
    assert type(loaded) is nn.Sequential
    assert not loaded.training
    assert same(model, loaded, CIFAR)
    metadata = read_metadata(tmp_path / "m.safetensors")
    assert (metadata.kind, metadata.input_shape, metadata.num_classes) == ("model", CIFAR, 10)
    assert metadata.notes == {"architecture": name, "seed": 1}


def test_layers_of_all_types_come_back(tmp_path):
    model = nn.Sequential(
        Normalize([0.2], [0.5]),
        PixelMask(torch.arange(64).reshape(TINY) % 3 > 0),
        nn.Conv2d(1, 4, (3, 2), stride=(1, 2), padding="valid", groups=1),
        nn.BatchNorm2d(4, affine=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
        nn.Sigmoid(),
        nn.MaxPool2d(2, stride=1),
        nn.AvgPool2d((2, 1), ceil_mode=True),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Identity(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Sequential(nn.Linear(6, 3)),
    )
    model(images(TINY, 20))  # moves the running statistics
    save_model(model, tmp_path / "m.safetensors", input_shape=TINY)
    assert same(model, load_model(tmp_path / "m.safetensors"), TINY)


def test_half_precision_comes_back_as_float32_of_exactly_the_rounded_numbers(tmp_path):
    model = nn.Sequential(Normalize([0.1307], [0.3081]), *build("A", MNIST, seed=2))
    save_model(model, tmp_path / "m.safetensors", input_shape=MNIST, dtype=torch.float16)
    loaded = load_model(tmp_path / "m.safetensors")
    for (name, value), (other, given) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other
        assert given.dtype == torch.float32
        assert torch.equal(given, value.half().float())
        assert not torch.equal(given, value)
    assert torch.equal(loaded[0].mean, model[0].mean)  # not rounded
    assert (tmp_path / "m.safetensors").stat().st_size < 0.52 * sum(4 * p.numel() for p in model.parameters())


def test_network_does_not_change_when_its_file_does(tmp_path):
    path = tmp_path / "m.safetensors"
    model = build("A", MNIST, seed=2).eval()
    save_model(model, path, input_shape=MNIST)
    loaded = load_model(path)
    with path.open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"\0" * 50_000)
    assert same(model, loaded, MNIST)


def test_double_precision_stays(tmp_path):
    model = build("A", MNIST, seed=2).double()
    save_model(model, tmp_path / "m.safetensors", input_shape=MNIST)
    loaded = load_model(tmp_path / "m.safetensors")
    assert torch.equal(loaded(images(MNIST).double()), model(images(MNIST).double()))


def test_ensemble_in_one_file(tmp_path):
    members = [nn.Sequential(Normalize([0.1], [0.3]), *build("A", MNIST, seed=0)), build("K", MNIST, seed=1)]
    ensemble = Ensemble(members, [0.3, 0.7], [1.7, 2.9], names=["a", "k"])
    certificate = {"eps": 0.1, "verified_error": 0.0441}
    save_model(ensemble, tmp_path / "e.safetensors", {"certificate": certificate}, input_shape=MNIST)
    loaded = load_model(tmp_path / "e.safetensors")
    assert isinstance(loaded, Ensemble)
    assert torch.equal(loaded.weights, ensemble.weights)
    assert torch.equal(loaded.scales, ensemble.scales)
    assert loaded.names == ("a", "k")
    assert same(ensemble, loaded, MNIST)
    assert read_metadata(tmp_path / "e.safetensors").notes["certificate"] == certificate


def test_stored_weights_come_back_to_the_last_bit(tmp_path):
    ensemble = Ensemble([build("fc 2", TINY, num_classes=2, seed=t) for t in range(3)], [0.2, 0.3, 0.5])
    with torch.no_grad():
        ensemble.weights.copy_(torch.tensor([0.2, 0.3, 0.5000000000000002], dtype=torch.float64))
    save_model(ensemble, tmp_path / "e.safetensors", input_shape=TINY)
    assert torch.equal(load_model(tmp_path / "e.safetensors").weights, ensemble.weights)


def test_member_used_twice(tmp_path):
    member = build("fc 2", TINY, num_classes=2, seed=0)
    save_model(Ensemble([member, member], [0.5, 0.5]), tmp_path / "e.safetensors", input_shape=TINY)
    assert same(member, load_model(tmp_path / "e.safetensors"), TINY)


# --- public checkpoints ---


def wong_kolter(shape, seed=0):
    """As published: Sequential(conv 16 4x4/2, ReLU, conv 32 4x4/2, ReLU, Flatten, fc 100, ReLU, fc 10)."""
    torch.manual_seed(seed)
    side = shape[1] // 4
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * side * side, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )


@pytest.mark.parametrize("shape", [MNIST, CIFAR], ids=["mnist", "cifar"])
@pytest.mark.parametrize("form", ["bare", "dict", "list", "module", "legacy", "half"])
def test_wong_kolter_checkpoint_without_a_name(form, shape, tmp_path):
    model = wong_kolter(shape)
    state = model.state_dict()
    if form == "half":
        model.half().float()
        state = {name: value.half() for name, value in state.items()}
    content = {
        "bare": state,
        "dict": {"state_dict": state, "err": 0.0451, "epoch": 60},
        "list": {"state_dict": [state], "err": 0.0451},
        "module": {"state_dict": {f"module.{name}": value for name, value in state.items()}},
        "legacy": {"state_dict": [state], "err": 0.0451},
        "half": {"state_dict": state},
    }[form]
    torch.save(content, tmp_path / "m.pth", _use_new_zipfile_serialization=form != "legacy")
    assert same(model, load_model(tmp_path / "m.pth"), shape)
    assert same(model, load_model(tmp_path / "m.pth", architecture="wk-small", input_shape=shape), shape)


def test_list_of_several_members(tmp_path):
    models = [wong_kolter(MNIST, seed) for seed in range(3)]
    torch.save({"state_dict": [model.state_dict() for model in models]}, tmp_path / "m.pth")
    loaded = load_models(tmp_path / "m.pth")
    assert [same(a, b, MNIST) for a, b in zip(models, loaded, strict=True)] == [True] * 3
    with pytest.raises(CheckpointError, match=r"holds 3 networks, expected one: use load_models"):
        load_model(tmp_path / "m.pth")


def test_wong_kolter_large_layout(tmp_path):
    model = build("conv 32 3x3/1, conv 32 4x4/2, conv 64 3x3/1, conv 64 4x4/2, fc 512, fc 512", MNIST, seed=0)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "m.pth")
    assert same(model, load_model(tmp_path / "m.pth"), MNIST)


def test_layers_after_the_tenth_are_in_numerical_order(tmp_path):
    model = build("fc 7, fc 7, fc 7, fc 7, fc 7, fc 7, fc 7", TINY, num_classes=7, seed=0)
    save_file(model.state_dict(), tmp_path / "m.safetensors")  # which sorts names as text
    assert same(model, load_model(tmp_path / "m.safetensors", input_shape=TINY), TINY)


def test_residual_network_with_its_architecture_named(tmp_path):
    model = build("K", MNIST, seed=0)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert same(model, load_model(tmp_path / "m.pt", architecture="K", input_shape=MNIST), MNIST)
    with pytest.raises(CheckpointError, match=r"no convolutional or fully connected layout.*name the architecture"):
        load_model(tmp_path / "m.pt")


def test_names_of_attributes_are_matched_by_unique_shapes_only(tmp_path):
    model = build("conv 4 4x4/2, fc 9", TINY, num_classes=5, seed=0)
    names = ["conv.weight", "conv.bias", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    state = dict(zip(names, model.state_dict().values(), strict=True))
    torch.save(dict(sorted(state.items())), tmp_path / "m.pt")
    text = "conv 4 4x4/2, fc 9"
    assert same(model, load_model(tmp_path / "m.pt", architecture=text, input_shape=TINY), TINY)
    model = build("fc 64, fc 64", TINY, num_classes=64)
    torch.save({f"layer{n}": value for n, value in enumerate(model.state_dict().values())}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="does not fit the tensors"):
        load_model(tmp_path / "m.pt", architecture="fc 64, fc 64", input_shape=TINY, num_classes=64)


def test_ambiguous_strides_are_not_guessed(tmp_path):
    torch.save(build("F", MNIST).state_dict(), tmp_path / "m.pt")  # three kernels 5x5, one of which has stride 4
    with pytest.raises(CheckpointError, match=r"3 layouts fit.*name the architecture"):
        load_model(tmp_path / "m.pt")
    assert load_model(tmp_path / "m.pt", architecture="F", input_shape=MNIST)[4].stride == (4, 4)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in "EFKL"])
def test_other_architectures_are_recognised(name, tmp_path):
    model = build(name, MNIST, seed=0)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert same(model, load_model(tmp_path / "m.pt"), MNIST)


# --- what is refused ---


class Runs:
    """A pickle that would create a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_code_is_not_run(legacy, tmp_path):
    target = tmp_path / "trace"
    state = wong_kolter(MNIST).state_dict()
    torch.save({"state_dict": state, "x": Runs(target)}, tmp_path / "m.pt", _use_new_zipfile_serialization=not legacy)
    target.unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="damaged, or holds more than tensors"):
        load_model(tmp_path / "m.pt")
    assert not target.exists()


def test_whole_pickled_modules_are_refused(tmp_path):
    torch.save(wong_kolter(MNIST), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"holds more than tensors.*model\.state_dict"):
        load_model(tmp_path / "m.pt")


def test_exported_programs_need_permission(tmp_path):
    model = build("fc 3", TINY, num_classes=2, seed=0)
    torch.export.save(torch.export.export(model, (images(TINY),)), tmp_path / "m.pt2")
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        load_model(tmp_path / "m.pt2")
    loaded = load_model(tmp_path / "m.pt2", allow_pickle=True)
    assert torch.equal(loaded(images(TINY)), model(images(TINY)))
    (tmp_path / "n.pt2").write_bytes(b"PK nothing")
    with pytest.raises(CheckpointError, match=r"cannot be loaded"):
        load_model(tmp_path / "n.pt2", allow_pickle=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_parameters_must_be_finite(bad, tmp_path):
    model = build("fc 3", TINY, num_classes=2, seed=0)
    state = model.state_dict()
    state["1.bias"][0] = bad
    torch.save(state, tmp_path / "m.pt")
    save_file(state, tmp_path / "m.safetensors")
    for name in ("m.pt", "m.safetensors"):
        with pytest.raises(CheckpointError, match=r"1\.bias holds NaN or infinity"):
            load_model(tmp_path / name, input_shape=TINY)
    with pytest.raises(InputError, match=r"1\.bias is not finite"):
        save_model(model, tmp_path / "n.safetensors", input_shape=TINY)


def test_overflow_to_half_precision_is_refused(tmp_path):
    model = build("fc 3", TINY, num_classes=2, seed=0)
    with torch.no_grad():
        model[1].bias[0] = 1e6
    with pytest.raises(InputError, match=r"1\.bias is not finite as torch\.float16"):
        save_model(model, tmp_path / "m.safetensors", input_shape=TINY, dtype=torch.float16)
    assert not list(tmp_path.iterdir())


def rewritten(path, **changes):
    """The file at `path` with these entries of its description changed."""
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        description = json.loads(opened.metadata()["robboost"])
    description.update(changes)
    save_file(load_file(path), path, metadata={"robboost": json.dumps(description)})


def layer(**settings):
    return [{"type": "Sequential", "layers": {"0": settings}}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format version 2, expected 1"),
        ({"format": None}, "format version None"),
        ({"kind": "pair"}, "kind='pair'"),
        ({"kind": "ensemble"}, "0 names for 1 members"),
        ({"input_shape": [1, -8, 8]}, "input_shape="),
        ({"input_shape": [1, 9, 8]}, "does not take images of shape"),
        ({"input_shape": "1"}, "input_shape='1'"),
        ({"num_classes": 3}, "a network of 2 classes, expected 3"),
        ({"num_classes": "2"}, "num_classes='2'"),
        ({"layers": []}, "no layers described"),
        ({"layers": [7]}, "no layers described"),
        ({"notes": []}, "names and notes"),
        ({"layers": layer(type="Lambda")}, "layer type 'Lambda' is unknown"),
        ({"layers": layer(type="Linear", in_features=64, out_features="eval", bias=True)}, "expected numbers"),
        ({"layers": layer(type="Linear", in_features=2**40, out_features=2, bias=True)}, "out of range"),
        ({"layers": layer(type="Linear", in_features=64)}, "layers of the network cannot be read"),
        ({"layers": layer(type="AvgPool2d")}, "layers of the network cannot be read"),
        ({"layers": layer(type="Sequential", layers=[1])}, "layers of the network cannot be read"),
        ({"layers": layer(type="Residual", body={"type": "ReLU"}, skip={"type": "ReLU"})}, "Sequential body"),
        ({"layers": layer(type="Normalize", channels=0, axes=2)}, "a Normalize layer of 0 channels"),
        ({"layers": layer(type="Flatten", start_dim=1, end_dim=-1)}, "a network of 64 classes"),
        ({"layers": layer(type="Flatten", start_dim=0, end_dim=-1)}, r"gives \[64\] for one image"),
        (
            {"layers": layer(type="MaxPool2d", kernel_size=1, stride=0, padding=0, ceil_mode=False)},
            "does not take images",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_description(changes, message, tmp_path):
    path = tmp_path / "m.safetensors"
    save_model(build("fc 3", TINY, num_classes=2, seed=0), path, input_shape=TINY)
    rewritten(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_enormous_layers_are_refused_before_they_are_allocated(tmp_path):
    path = tmp_path / "m.safetensors"
    save_model(build("fc 3", TINY, num_classes=2, seed=0), path, input_shape=TINY)
    side = 2**31 - 1
    linear = {"type": "Linear", "in_features": side, "out_features": side, "bias": True}
    flatten = {"type": "Flatten", "start_dim": 1, "end_dim": -1}
    rewritten(path, layers=[{"type": "Sequential", "layers": {"0": flatten, "1": linear}}])
    with pytest.raises(CheckpointError, match="Storage size calculation overflowed"):
        load_model(path)
    pair = [1, 1]
    pad = {"in_channels": 1, "out_channels": 1, "kernel_size": pair, "stride": pair, "padding": [10**5] * 2}
    rewritten(path, layers=layer(type="Conv2d", **pad, dilation=pair, groups=1, bias=False))
    with pytest.raises(CheckpointError, match="numbers for one image, at most"):
        load_model(path)


def test_normalisation_by_nothing_is_refused(tmp_path):
    model = nn.Sequential(Normalize([0.5], [0.5]), nn.Flatten(), nn.Linear(64, 2))
    model[0].std.zero_()
    save_model(model, tmp_path / "m.safetensors", input_shape=TINY)
    with pytest.raises(CheckpointError, match=r"0\.std holds numbers that are not above zero"):
        load_model(tmp_path / "m.safetensors")


def test_negative_weights_in_a_file_are_refused(tmp_path):
    ensemble = Ensemble([build("fc 2", TINY, num_classes=2, seed=t) for t in range(2)], [0.5, 0.5])
    ensemble.weights.copy_(torch.tensor([1.5, -0.5]))
    save_model(ensemble, tmp_path / "e.safetensors", input_shape=TINY)
    with pytest.raises(CheckpointError, match=r"weights sum to 1, lowest -0\.5"):
        load_model(tmp_path / "e.safetensors")


def test_what_is_no_model_file(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"12345678")
    (tmp_path / "empty.pt").touch()
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({}, tmp_path / "none.pt")
    torch.save({"state_dict": []}, tmp_path / "nothing.pt")
    torch.save({"a": torch.rand(3, dtype=torch.complex64)}, tmp_path / "complex.pt")
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    save_file({"a": torch.rand(3)}, tmp_path / "other.safetensors")
    for name, message in {
        "missing.pt": "missing, expected a model file",
        "": "a folder, expected a model file",
        "a.bin": "unknown kind of file",
        "empty.pt": "0 bytes",
        "list.pt": "holds a int where a state dict was expected",
        "none.pt": "holds a dict where a state dict",
        "nothing.pt": "holds no state dict",
        "complex.pt": "sparse, quantised or complex",
        "sparse.pt": "sparse, quantised or complex",
        "other.safetensors": "no convolutional or fully connected layout",
    }.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            load_model(tmp_path / name)
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="does not describe itself"):
        read_metadata(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="missing"):
        load_model("a\0b.pt")


def test_description_that_does_not_fit_the_tensors(tmp_path):
    path = tmp_path / "m.safetensors"
    save_model(build("fc 3", TINY, num_classes=2, seed=0), path, input_shape=TINY)
    description = read_metadata(path).layers[0]
    description["layers"]["1"]["out_features"] = description["layers"]["3"]["in_features"] = 4
    rewritten(path, layers=[description])
    with pytest.raises(CheckpointError, match=r"tensor 1\.weight is \[3, 64\] in the file, expected \[4, 64\]"):
        load_model(path)


def test_wrong_architecture(tmp_path):
    torch.save(wong_kolter(MNIST).state_dict(), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"architecture 'A' does not fit the tensors 0\.weight \[16, 1, 4, 4\]"):
        load_model(tmp_path / "m.pt", architecture="A", input_shape=MNIST)
    with pytest.raises(InputError, match="cannot read 'Q'"):
        load_model(tmp_path / "m.pt", architecture="Q", input_shape=MNIST)


class Free(nn.Module):
    """A forward of its own: branches, arithmetic from both sides, a matrix on the last of three axes, two poolings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(1, 2, 3, padding="same", padding_mode="zeros", bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.first, self.second = nn.Linear(2, 5), nn.Linear(80, 3, bias=False)
        self.offset = nn.Parameter(torch.rand(5))

    def forward(self, x):
        value = torch.relu(self.norm(self.convolution(x)))
        value = value + 2 * torch.sigmoid(value)
        pooled = nn.functional.avg_pool2d(value, 2, divisor_override=3) - nn.functional.max_pool2d(value, 2)
        value = self.first(pooled.reshape(-1, 2, 16).permute(0, 2, 1))
        value = 1.5 - nn.functional.leaky_relu(value * self.offset, 0.2) + torch.tanh(value)
        return -self.second(torch.sigmoid(value).flatten(1)) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_network_with_a_forward_of_its_own(dtype, tmp_path):
    model = Free()
    model(images(TINY, 20))
    model = model.eval().to(dtype)
    save_model(Ensemble([model, model], [0.5, 0.5]), tmp_path / "e.safetensors", input_shape=TINY)
    save_model(model, tmp_path / "m.safetensors", input_shape=TINY)
    x = images(TINY).to(dtype)
    expected = model(x)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for name in ("e", "m"):
        loaded = load_model(tmp_path / f"{name}.safetensors")
        torch.testing.assert_close(loaded(x), expected, rtol=tolerance, atol=tolerance)
        assert next(loaded.parameters()).dtype == dtype
    assert type(loaded) is WiredNetwork
    save_model(loaded, tmp_path / "again.safetensors", input_shape=TINY)
    assert torch.equal(load_model(tmp_path / "again.safetensors")(x), loaded(x))


def test_exported_program_can_be_saved(tmp_path):
    model = build("K", MNIST, seed=0).eval()
    program = torch.export.export(model, (images(MNIST),), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    save_model(program, tmp_path / "m.safetensors", input_shape=MNIST)
    torch.testing.assert_close(load_model(tmp_path / "m.safetensors")(images(MNIST)), model(images(MNIST)))


class Odd(nn.Module):
    def forward(self, x):
        return torch.sin(x.flatten(1)[:, :2])


class Both(nn.Module):
    def forward(self, x):
        return nn.functional.avg_pool2d(x, 3, ceil_mode=True, divisor_override=5).flatten(1)


def test_what_cannot_be_saved(tmp_path):
    path, model = tmp_path / "m.safetensors", build("fc 3", TINY, num_classes=2, seed=0)
    circular = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    for network, message in (
        (Odd(), r"aten\.slice at"),
        (nn.Sequential(circular, nn.Flatten()), "has no bound rule"),
        (Both(), "together with ceil_mode"),
    ):
        with pytest.raises(UnsupportedOperationError, match=message):
            save_model(network.eval(), path, input_shape=TINY)
    with pytest.raises(CheckpointError, match=r"does not take images of shape \[3, 8, 8\]"):
        save_model(model, path, input_shape=(3, 8, 8))
    with pytest.raises(InputError, match="notes cannot be written"):
        save_model(model, path, {"loss": float("nan")}, input_shape=TINY)
    with pytest.raises(InputError, match=r"expected a \.safetensors file"):
        save_model(model, tmp_path / "m.pt", input_shape=TINY)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_model(model, tmp_path / "no" / "m.safetensors", input_shape=TINY)
    other = build("fc 3", TINY, num_classes=4)
    with pytest.raises(InputError, match="same number"):
        save_model(Ensemble([model, other], [0.5, 0.5]), path, input_shape=TINY)
    assert not list(tmp_path.iterdir())


def test_first_layers_by_hand():
    assert Normalize([1.0, 2.0], [2.0, 4.0])(torch.tensor([[[[3.0]], [[6.0]]]])).flatten().tolist() == [1.0, 1.0]
    assert PixelMask(torch.tensor([[[1, 0]]]))(torch.tensor([[[[3.0, 6.0]]]])).flatten().tolist() == [3.0, 0.0]
    assert "std=[2.0]" in repr(Normalize([1.0], [2.0]))
    assert "shape=[1, 1, 2]" in repr(PixelMask(torch.tensor([[[1, 0]]])))
    for mean, std in (([], []), ([0.0], [1.0, 1.0]), ([0.0], [0.0]), ([float("nan")], [1.0])):
        with pytest.raises(InputError, match="mean="):
            Normalize(mean, std)
    with pytest.raises(InputError, match="0 and 1"):
        PixelMask(torch.tensor([0.5]))


def test_errors_are_the_librarys_own():
    assert issubclass(CheckpointError, RobBoostError)
