"""ONNX out: members and ensembles against onnxruntime, back through the importer, and what is refused."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from robboost.errors import CheckpointError, InputError, SoundnessError, UnsupportedOperationError
from robboost.exchange import export_onnx, onnx_export
from robboost.models import Ensemble, Normalize, load_model, save_model
from robboost.models.architectures import ARCHITECTURES, build

MNIST, TINY = (1, 28, 28), (2, 6, 6)


def run(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0])


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in "CDFHIJL"])
def test_architectures(name, tmp_path):
    model = nn.Sequential(Normalize([0.1307], [0.3081]), *build(name, MNIST, seed=0, batch_norm=name == "A")).eval()
    result = export_onnx(model, tmp_path / "m.onnx", input_shape=MNIST)
    assert result.largest_difference <= 1e-5
    x = torch.rand(5, *MNIST)
    torch.testing.assert_close(run(result.path, x), model(x).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(load_model(result.path)(x), model(x), rtol=1e-5, atol=1e-5)


def test_ensemble_is_one_network(tmp_path):
    members = [nn.Sequential(Normalize([0.1], [0.3]), *build("A", MNIST, seed=0)), build("K", MNIST, seed=1).eval()]
    ensemble = Ensemble(members, [0.3, 0.7], [1.7, 0.29])
    export_onnx(ensemble, tmp_path / "e.onnx", input_shape=MNIST)
    x = torch.rand(5, *MNIST)
    torch.testing.assert_close(run(tmp_path / "e.onnx", x), ensemble(x).detach(), rtol=1e-5, atol=1e-5)
    loaded = load_model(tmp_path / "e.onnx")
    torch.testing.assert_close(loaded(x), ensemble(x), rtol=1e-5, atol=1e-5)
    save_model(loaded, tmp_path / "e.safetensors", input_shape=MNIST)  # a wired network, saved without ONNX
    assert torch.equal(load_model(tmp_path / "e.safetensors")(x), loaded(x))


BODIES = {
    "leaky": nn.LeakyReLU(0.3),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "max": nn.MaxPool2d(3, stride=2, padding=1),
    "average": nn.AvgPool2d((2, 3), stride=1, padding=1, count_include_pad=False),
    "average with pad": nn.AvgPool2d(2, padding=1),
    "average by a divisor": nn.AvgPool2d(3, padding=1, count_include_pad=False, divisor_override=5),
    "global average": nn.AdaptiveAvgPool2d(1),
    "grouped dilated conv": nn.Conv2d(
        2, 4, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=2, bias=False
    ),
    "batch norm": nn.BatchNorm2d(2),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_operations(name, dtype, tmp_path):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 2, 1), BODIES[name], nn.Flatten())
    body(torch.rand(9, *TINY) * 2)  # moves running statistics
    model = nn.Sequential(body, nn.Linear(body(torch.zeros(1, *TINY)).shape[1], 3)).eval().to(dtype)
    export_onnx(model, tmp_path / "m.onnx", input_shape=TINY)
    x = torch.rand(4, *TINY)
    expected = model(x.to(dtype)).detach().float()
    torch.testing.assert_close(run(tmp_path / "m.onnx", x), expected, rtol=1e-5, atol=1e-5)
    BODIES[name].float()


class Odd(nn.Module):
    """Reshapes, permutations, arithmetic on both sides, a matrix on the last of three axes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 5), nn.Linear(180, 3, bias=False)
        self.offset = nn.Parameter(torch.rand(5))

    def forward(self, x):
        value = self.first(x.reshape(-1, 2, 36).permute(0, 2, 1))
        value = 1.5 - torch.relu(value * self.offset) + value
        return -self.second(value.flatten(1)) / 2


def test_free_form_network(tmp_path):
    model = Odd().eval()
    export_onnx(model, tmp_path / "m.onnx", input_shape=TINY)
    x = torch.rand(4, *TINY)
    torch.testing.assert_close(run(tmp_path / "m.onnx", x), model(x).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(load_model(tmp_path / "m.onnx")(x), model(x), rtol=1e-5, atol=1e-5)


def test_fixed_batch(tmp_path):
    model = build("fc 4", TINY, num_classes=3, seed=0).eval()
    export_onnx(model, tmp_path / "m.onnx", input_shape=TINY, batch_size=1)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [1, *TINY]
    assert session.get_outputs()[0].shape == [1, 3]


def test_wrong_export_is_noticed_and_not_left_behind(tmp_path, monkeypatch):
    monkeypatch.setitem(onnx_export._WRITERS, "relu", onnx_export._WRITERS["tanh"])
    with pytest.raises(SoundnessError, match=r"logits from onnxruntime differ by"):
        export_onnx(build("fc 4", TINY, seed=0).eval(), tmp_path / "m.onnx", input_shape=TINY)
    assert not list(tmp_path.iterdir())


def test_what_is_refused(tmp_path):
    path, model = tmp_path / "m.onnx", build("fc 4", TINY, seed=0).eval()
    with pytest.raises(InputError, match="float16"):
        export_onnx(build("fc 4", TINY, seed=0).eval().half(), path, input_shape=TINY)
    with pytest.raises(InputError, match="batch_size=0"):
        export_onnx(model, path, input_shape=TINY, batch_size=0)
    with pytest.raises(InputError, match="training mode"):
        export_onnx(model.train(), path, input_shape=TINY)
    model.eval()
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_onnx(model, tmp_path / "no" / "m.onnx", input_shape=TINY)
    ceiling = nn.Sequential(nn.MaxPool2d(4, ceil_mode=True), nn.Flatten(), nn.Linear(8, 2)).eval()
    with pytest.raises(UnsupportedOperationError, match="ceil_mode is not exported"):
        export_onnx(ceiling, path, input_shape=TINY)
    assert not list(tmp_path.iterdir())


def test_numbers_are_stored_exactly(tmp_path):
    model = build("fc 4", TINY, num_classes=3, seed=0).eval()
    export_onnx(model, tmp_path / "m.onnx", input_shape=TINY)
    loaded = load_model(tmp_path / "m.onnx")
    ours, theirs = (np.concatenate([p.detach().numpy().ravel() for p in m.parameters()]) for m in (model, loaded))
    assert np.array_equal(np.sort(ours), np.sort(theirs))
