"""ONNX networks: logits against onnxruntime for every operation, what is refused, what is checked before it is read."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from robboost.errors import CheckpointError, UnsupportedOperationError
from robboost.models import Normalize, load_model, read_pool, save_model
from robboost.models.architectures import build
from robboost.models.graph import trace
from robboost.models.onnx_import import MAX_OPSET, MIN_OPSET
from robboost.models.onnx_rules import RULES
from robboost.models.wiring import Step, WiredNetwork

SHAPE = (2, 6, 6)
ONE, MIXED = (numpy_helper.from_array(np.array(v, dtype=np.float32), "v") for v in (1, [-1, 1]))
ROUND = [0, 0, 1, 1, 0, 0, 1, 1]


def constant(name, *shape, low=-1.0, dtype=np.float32):
    rng = np.random.default_rng(sum(map(ord, name)) + sum(shape))
    return numpy_helper.from_array(rng.uniform(low, 1, shape).astype(dtype), name)


def integers(name, *values):
    return numpy_helper.from_array(np.array(values, dtype=np.int64), name)


def node(kind, inputs, output, **attributes):
    return helper.make_node(kind, inputs.split(), output.split(), name=f"{kind}_{output}", **attributes)


def written(path, nodes, constants, *, shape=SHAPE, batch="N", opset=17, dtype=TensorProto.FLOAT, output="y"):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", dtype, [batch, *shape])],
        [helper.make_tensor_value_info(output, dtype, None)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    onnx.save(model, path)
    return path


def agrees(path, shape=SHAPE, dtype=np.float32):
    """Logits of the imported network, on a batch, against onnxruntime image by image."""
    model = load_model(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).uniform(0, 1, (4, *shape)).astype(dtype)
    expected = np.concatenate([session.run(None, {"x": image[None]})[0] for image in x])
    with torch.no_grad():
        given = model(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(given, expected, atol=1e-5, rtol=1e-5)
    assert np.ptp(expected) > 1e-3  # the comparison would notice a wrong network
    trace(model, shape)  # and it has bounds
    return model


HEAD = [node("Flatten", "h", "flat"), node("Gemm", "flat head bias", "y", transB=1)]


def head(size, classes=3):
    return [constant("head", classes, size), constant("bias", classes)]


BODIES = {
    "conv": (
        [node("Conv", "x w b", "h", pads=[1, 1, 1, 1], strides=[2, 2])],
        [constant("w", 4, 2, 3, 3), constant("b", 4)],
        36,
    ),
    "conv without pads": ([node("Conv", "x w", "h")], [constant("w", 4, 2, 3, 2)], 80),
    "conv uneven pads": (
        [node("Conv", "x w", "h", pads=[0, 2, 1, 0], strides=[2, 1])],
        [constant("w", 3, 2, 3, 2)],
        63,
    ),
    "conv uneven pads, other way": ([node("Conv", "x w", "h", pads=[2, 0, 1, 3])], [constant("w", 1, 2, 3, 2)], 56),
    "conv same upper": (
        [node("Conv", "x w", "h", auto_pad="SAME_UPPER", strides=[2, 2])],
        [constant("w", 3, 2, 3, 3)],
        27,
    ),
    "conv same lower": ([node("Conv", "x w", "h", auto_pad="SAME_LOWER")], [constant("w", 3, 2, 2, 2)], 108),
    "conv valid": ([node("Conv", "x w", "h", auto_pad="VALID")], [constant("w", 3, 2, 2, 2)], 75),
    "conv groups": ([node("Conv", "x w", "h", group=2)], [constant("w", 4, 1, 3, 3)], 64),
    "conv dilated": ([node("Conv", "x w", "h", dilations=[2, 2])], [constant("w", 4, 2, 3, 3)], 16),
    "pad then conv": (
        [node("Pad", "x p", "q"), node("Conv", "q w", "h", pads=[0, 1, 0, 0])],
        [integers("p", 0, 0, 1, 0, 0, 0, 2, 1), constant("w", 2, 2, 3, 3)],
        2 * 7 * 6,
    ),
    "pad of nothing": ([node("Pad", "x p", "h")], [integers("p", *[0] * 8)], 72),
    "relu": ([node("Sub", "x s", "q"), node("Relu", "q", "h")], [constant("s", 2, 1, 1)], 72),
    "leaky": ([node("Sub", "x s", "q"), node("LeakyRelu", "q", "h", alpha=0.3)], [constant("s", 2, 1, 1)], 72),
    "leaky default": ([node("Sub", "x s", "q"), node("LeakyRelu", "q", "h")], [constant("s", 2, 1, 1)], 72),
    "sigmoid": ([node("Sigmoid", "x", "h")], [], 72),
    "tanh": ([node("Tanh", "x", "h")], [], 72),
    "neg": ([node("Neg", "x", "h")], [], 72),
    "constant minus images": ([node("Sub", "s x", "h")], [constant("s", 1, 2, 1, 6)], 72),
    "scalar": ([node("Mul", "s x", "h")], [constant("s")], 72),
    "div": ([node("Div", "x s", "h")], [constant("s", 2, 6, 6, low=0.5)], 72),
    "batch norm": (
        [node("BatchNormalization", "x a b c d", "h", epsilon=0.1)],
        [constant("a", 2), constant("b", 2), constant("c", 2), constant("d", 2, low=0.5)],
        72,
    ),
    "average": ([node("AveragePool", "x", "h", kernel_shape=[2, 3], pads=[1, 1, 1, 1])], [], 2 * 7 * 6),
    "average with pad": (
        [node("AveragePool", "x", "h", kernel_shape=[2, 2], strides=[2, 2], pads=[1, 0, 1, 0], count_include_pad=1)],
        [],
        24,
    ),
    "global average": ([node("GlobalAveragePool", "x", "h")], [], 2),
    "max": ([node("MaxPool", "x", "h", kernel_shape=[3, 2], strides=[3, 2], pads=[0, 1, 0, 1])], [], 16),
    "max ceil, fitting": ([node("MaxPool", "x", "h", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)], [], 18),
    "transpose": ([node("Transpose", "x", "h", perm=[0, 2, 3, 1])], [], 72),
    "reshape": ([node("Reshape", "x s", "q"), node("Relu", "q", "h")], [integers("s", 0, 3, -1)], 72),
    "reshape to one": ([node("Reshape", "x s", "h")], [integers("s", 1, -1)], 72),
    "reshape of old exporters": (
        [
            node("Shape", "x", "s"),
            node("Gather", "s zero", "n"),
            node("Unsqueeze", "n axis", "m"),
            node("Concat", "m minus", "t", axis=0),
            node("Reshape", "x t", "h"),
        ],
        [numpy_helper.from_array(np.array(0), "zero"), integers("axis", 0), integers("minus", -1)],
        72,
    ),
    "squeeze": (
        [node("Unsqueeze", "x a", "q"), node("Squeeze", "q b", "h")],
        [integers("a", 1, -1), integers("b", 1)],
        72,
    ),
    "dropout": ([node("Dropout", "x", "h")], [], 72),
    "identity and cast": ([node("Identity", "x", "q"), node("Cast", "q", "h", to=1)], [], 72),
    "constant": ([node("Constant", "", "s", value_float=2.5), node("Mul", "x s", "h")], [], 72),
    "constant list": ([node("Constant", "", "s", value=constant("", 6)), node("Mul", "x s", "h")], [], 72),
    "folded": (
        [
            node("Identity", "w", "w0"),
            node("Transpose", "w0", "w1", perm=[3, 2, 1, 0]),
            node("Reshape", "w1 shape", "w2"),
            node("Squeeze", "w2 last", "w3"),
            node("Add", "w3 w3", "w4"),
            node("Cast", "w4", "w5", to=1),
            node("Conv", "x w5", "h"),
        ],
        [constant("w", 2, 3, 2, 4), integers("shape", 4, 2, 2, -1, 1), integers("last", 4)],
        4 * 5 * 4,
    ),
    "skip": (
        [node("Conv", "x w", "q", pads=[1, 1, 1, 1]), node("Relu", "q", "r"), node("Add", "r x", "h")],
        [constant("w", 2, 2, 3, 3)],
        72,
    ),
    "difference": (
        [node("Sigmoid", "x", "q"), node("Sub", "x q", "h")],
        [],
        72,
    ),
    "unused": ([node("Tanh", "x", "nothing"), node("Relu", "x", "h")], [], 72),
}


@pytest.mark.parametrize("name", BODIES)
def test_operation(name, tmp_path):
    nodes, constants, size = BODIES[name]
    agrees(written(tmp_path / "m.onnx", [*nodes, *HEAD], [*constants, *head(size)]))


def test_every_rule_is_compared():
    used = {entry.op_type for nodes, _, _ in BODIES.values() for entry in nodes} | {"Flatten", "Gemm"}
    assert used | {"MatMul"} == set(RULES)  # MatMul: below


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        ([node("MatMul", "f w", "a"), node("Add", "a b", "y")], [constant("w", 72, 3), constant("b", 3)]),
        ([node("MatMul", "f w", "a"), node("Add", "b a", "y")], [constant("w", 72, 3), constant("b", 1, 3)]),
        ([node("MatMul", "f w", "a"), node("Add", "a b", "y")], [constant("w", 72, 3), constant("b")]),
        # The product itself is used a second time: the bias must not reach it.
        (
            [node("MatMul", "f w", "a"), node("Add", "a b", "c"), node("Relu", "c", "d"), node("Add", "a d", "y")],
            [constant("w", 72, 3), constant("b", 3)],
        ),
        (
            [node("MatMul", "f w", "a"), node("Identity", "a", "e"), node("Add", "e b", "c"), node("Add", "a c", "y")],
            [constant("w", 72, 3), constant("b", 3)],
        ),
        ([node("Gemm", "f w", "y", alpha=0.5)], [constant("w", 72, 3)]),
        ([node("Gemm", "f w b", "y", alpha=0.5, beta=3.0, transB=1)], [constant("w", 3, 72), constant("b", 1, 3)]),
        ([node("Gemm", "f w b", "y")], [constant("w", 72, 3), constant("b", 1)]),
    ],
)
def test_products(nodes, constants, tmp_path):
    agrees(written(tmp_path / "m.onnx", [node("Flatten", "x", "f"), *nodes], constants))


@pytest.mark.parametrize("opset", range(MIN_OPSET, MAX_OPSET + 1))
def test_every_opset(opset, tmp_path):
    """The operations whose form changed between versions, in the form of each."""
    pads, axes = [0, 0, 1, 1, 0, 0, 1, 1], [1]
    nodes = [
        node("Pad", "x", "a", pads=pads) if opset < 11 else node("Pad", "x p", "a"),
        node("Conv", "a w b", "c", strides=[2, 2]),
        node("BatchNormalization", "c b b m v", "d"),
        node("Dropout", "d", "e", ratio=0.5) if opset < 12 else node("Dropout", "d", "e"),
        node("Unsqueeze", "e", "f", axes=axes) if opset < 13 else node("Unsqueeze", "e ax", "f"),
        node("Squeeze", "f", "g", axes=axes) if opset < 13 else node("Squeeze", "f ax", "g"),
        node("AveragePool", "g", "i", kernel_shape=[2, 2]),
        node("MaxPool", "i", "h", kernel_shape=[1, 1]),
        node("Flatten", "h", "flat"),
        node("Gemm", "flat head bias", "y", transB=1),
    ]
    constants = [constant("w", 4, 2, 3, 3), constant("b", 4), constant("m", 4), constant("v", 4, low=0.2), *head(16)]
    if opset >= 11:
        constants.append(integers("p", *pads))
    if opset >= 13:
        constants.append(integers("ax", *axes))
    agrees(written(tmp_path / "m.onnx", nodes, constants, opset=opset))


@pytest.mark.parametrize(("name", "dynamo"), [("A", False), ("K", False), ("A", True)])
def test_what_pytorch_exports(name, dynamo, tmp_path):
    """Both of PyTorch's exporters (the newer one needs the package onnxscript)."""
    shape = (1, 28, 28)
    model = nn.Sequential(Normalize([0.1307], [0.3081]), *build(name, shape, seed=0, batch_norm=name == "A")).eval()
    x = torch.rand(2, *shape)
    torch.onnx.export(model, (x[:1],), tmp_path / "m.onnx", input_names=["x"], dynamo=dynamo, external_data=False)
    loaded = load_model(tmp_path / "m.onnx")
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-5)
    trace(loaded, shape)


def test_chains_become_sequential_and_others_are_wired(tmp_path):
    chain = written(tmp_path / "c.onnx", [node("Relu", "x", "h"), *HEAD], head(72))
    assert [type(layer) for layer in load_model(chain)] == [nn.ReLU, nn.Flatten, nn.Linear]
    nodes, constants, size = BODIES["skip"]
    wired = load_model(written(tmp_path / "w.onnx", [*nodes, *HEAD], [*constants, *head(size)]))
    assert isinstance(wired, WiredNetwork)
    x = torch.rand(3, *SHAPE)
    for name in ("c", "w"):
        model = load_model(tmp_path / f"{name}.onnx")
        save_model(model, tmp_path / f"{name}.safetensors", input_shape=SHAPE)
        assert torch.equal(load_model(tmp_path / f"{name}.safetensors")(x), model(x))
    for file in (tmp_path / "c.safetensors", tmp_path / "w.safetensors"):
        file.unlink()
    assert read_pool(tmp_path).input_shape == SHAPE


def test_double_and_half_precision(tmp_path):
    double = [constant("head", 3, 72, dtype=np.float64), constant("bias", 3, dtype=np.float64)]
    nodes = [node("Relu", "x", "h"), *HEAD]
    model = agrees(written(tmp_path / "d.onnx", nodes, double, dtype=TensorProto.DOUBLE), dtype=np.float64)
    assert model[2].weight.dtype == torch.float64
    half = [constant("head", 3, 72, dtype=np.float16), constant("bias", 3, dtype=np.float16)]
    model = load_model(written(tmp_path / "h.onnx", nodes, half, dtype=TensorProto.FLOAT16))
    assert model[2].weight.dtype == torch.float32
    assert torch.equal(model[2].weight, torch.from_numpy(numpy_helper.to_array(half[0])).float())


def test_open_sides_need_an_input_shape(tmp_path):
    path = written(tmp_path / "m.onnx", [node("Relu", "x", "h"), *HEAD], head(72), shape=(2, "H", "W"))
    with pytest.raises(CheckpointError, match=r"leaves sides open.*input_shape"):
        load_model(path)
    assert load_model(path, input_shape=SHAPE)(torch.zeros(1, *SHAPE)).shape == (1, 3)
    for shape in ((3, 6, 6), (2, 6)):
        with pytest.raises(CheckpointError, match="does not fit input_shape"):
            load_model(path, input_shape=shape)


# --- what is refused ---

ADD_U = [node("Add", "x u", "h")]
REFUSED = {
    "Softmax": ([node("Softmax", "x", "h")], [], "Softmax at node 'Softmax_h' has no rule; known: Add, "),
    "domain": ([helper.make_node("Relu", ["x"], ["h"], domain="my.own")], [], r"my\.own\.Relu at node \['h'\]"),
    "concat": ([node("Concat", "x x", "h", axis=1)], [], "Concat at node 'Concat_h': joining values"),
    "product": ([node("Mul", "x x", "h")], [], "both operands depend"),
    "quotient": ([node("Div", "s x", "h")], [constant("s", 1)], "a divisor that"),
    "by zero": ([node("Div", "x s", "h")], [numpy_helper.from_array(np.zeros(1, np.float32), "s")], "a divisor that"),
    "conv1d": ([node("Conv", "x w", "h")], [constant("w", 2, 2, 3)], "weight of shape"),
    "conv of weights": ([node("Conv", "x x", "h")], [], "input 1 is not a constant"),
    "conv channels": ([node("Conv", "x w", "h")], [constant("w", 2, 3, 3, 3)], "sizes do not fit"),
    "conv kernel": ([node("Conv", "x w", "h", kernel_shape=[2, 2])], [constant("w", 2, 2, 3, 3)], "kernel_shape="),
    "conv stride": ([node("Conv", "x w", "h", strides=[0, 1])], [constant("w", 2, 2, 3, 3)], "sizes do not fit"),
    "conv pads": ([node("Conv", "x w", "h", pads=[-1, 0, 0, 0])], [constant("w", 2, 2, 3, 3)], "pads="),
    "conv huge pads": ([node("Conv", "x w", "h", pads=[0, 0, 2**30, 0])], [constant("w", 2, 2, 3, 3)], "pads="),
    "conv large": ([node("Conv", "x w", "h", pads=[2**17] * 4)], [constant("w", 2, 2, 3, 3)], "at most 268435456"),
    "conv dilated uneven": (
        [node("Conv", "x w", "h", pads=[1, 0, 0, 0], dilations=[2, 2])], [constant("w", 2, 2, 2, 2)], "dilated"
    ),
    "conv bias": ([node("Conv", "x w b", "h")], [constant("w", 2, 2, 3, 3), constant("b", 3)], "do not fit together"),
    "conv group": ([node("Conv", "x w", "h", group=0)], [constant("w", 2, 2, 3, 3)], "group=0"),
    "auto_pad": ([node("Conv", "x w", "h", auto_pad="MORE")], [constant("w", 2, 2, 3, 3)], "auto_pad='MORE'"),
    "attribute": ([node("Conv", "x w", "h", group=1.5)], [constant("w", 2, 2, 3, 3)], "expected a int"),
    "pad then relu": ([node("Pad", "x p", "q"), node("Relu", "q", "h")], [integers("p", *ROUND)], "padded"),
    "pad of channels": ([node("Pad", "x p", "h")], [integers("p", 0, 1, 0, 0, 0, 0, 0, 0)], "pads="),
    "pad with ones": (
        [node("Pad", "x p v", "h")], [integers("p", *[0] * 8), ONE], "only zeros"
    ),
    "pad reflecting": ([node("Pad", "x p", "h", mode="reflect")], [integers("p", *[0] * 8)], "only zeros"),
    "max with indices": ([node("MaxPool", "x", "h i", kernel_shape=[2, 2])], [], "with indices"),
    "max uneven": ([node("MaxPool", "x", "h", kernel_shape=[2, 2], pads=[1, 0, 0, 0])], [], "differs between"),
    "max ceil": ([node("MaxPool", "x", "h", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)], [], "ceil_mode"),
    "pool of one dimension": ([node("AveragePool", "x", "h", kernel_shape=[2])], [], "kernel_shape="),
    "training": (
        [node("BatchNormalization", "x b b b b", "h", training_mode=1)], [constant("b", 2, low=0.1)], "in training mode"
    ),
    "variance": ([node("BatchNormalization", "x b b b v", "h")], [constant("b", 2), MIXED], "variance below"),
    "norm shapes": ([node("BatchNormalization", "x b b b v", "h")], [constant("b", 2), constant("v", 3)], "differ"),
    "dropout": (
        [node("Dropout", "x r t", "h")],
        [constant("r"), numpy_helper.from_array(np.array(True), "t")],
        "in training mode it is random",
    ),
    "transpose of the batch": ([node("Transpose", "x", "h", perm=[1, 0, 2, 3])], [], "moves the batch axis"),
    "transpose axes": ([node("Transpose", "x", "h", perm=[0, 0, 2, 3])], [], "perm="),
    "reshape of the batch": ([node("Reshape", "x s", "h")], [integers("s", -1, 6)], "the batch axis of one must stay"),
    "reshape size": ([node("Reshape", "x s", "h")], [integers("s", 1, 5)], "shape \\[1, 5\\]"),
    "reshape open": ([node("Reshape", "x x", "h")], [], "input 1 is not a constant"),
    "flatten axis": ([node("Flatten", "x", "h", axis=9)], [], "axis=9"),
    "squeeze": ([node("Squeeze", "x s", "h")], [integers("s", 1)], "axes="),
    "unsqueeze": ([node("Unsqueeze", "x s", "h")], [integers("s", 99)], "axes="),
    "larger constant": ([node("Add", "x s", "h")], [constant("s", 5, 2, 6, 6)], "would enlarge"),
    "constant with more axes": ([node("Add", "x s", "h")], [constant("s", 1, 1, 2, 6, 6)], "would enlarge"),
    "constant of another shape": ([node("Add", "x s", "h")], [constant("s", 5)], "do not fit together"),
    "cast": ([node("Cast", "x", "h", to=7)], [], "to type 7"),
    "two constants": ([node("Add", "s t", "u"), *ADD_U], [constant("s", 2), constant("t", 3)], "do not fit"),
    "integers": ([node("Div", "s s", "u"), node("Add", "x u", "h")], [integers("s", 2)], "division of integers"),
    "gather": ([node("Gather", "s i", "u"), node("Add", "x u", "h")], [constant("s", 2), integers("i", 2)], "entries"),
    "no number": ([node("Constant", "", "s", value_string="a"), node("Add", "x s", "h")], [], "no number in it"),
    "matmul": ([node("MatMul", "x w", "h")], [constant("w", 2, 6, 3)], "expected a matrix"),
    "gemm of images": ([node("Gemm", "x w", "h")], [constant("w", 6, 3)], "expected images as rows"),
    "unknown value": ([node("Relu", "zz", "h")], [], "input 0 is unknown"),
    "relu of a constant": ([node("Relu", "s", "h")], [constant("s", 2)], "input 0 is a constant"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_operation_is_named(name, tmp_path):
    nodes, constants, message = REFUSED[name]
    path = written(tmp_path / "m.onnx", [*nodes, *HEAD], [*constants, *head(72)])
    with pytest.raises(UnsupportedOperationError, match=message) as caught:
        load_model(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_gemm_that_does_not_fit(tmp_path):
    for nodes, message in (
        ([node("Gemm", "f w", "y", transA=1)], "expected images as rows"),
        ([node("Gemm", "f w b", "y")], "bias of shape"),
        ([node("Gemm", "f w", "y", transB=1)], "sizes do not fit"),
    ):
        path = written(
            tmp_path / "m.onnx", [node("Flatten", "x", "f"), *nodes], [constant("w", 72, 3), constant("b", 2)]
        )
        with pytest.raises(UnsupportedOperationError, match=message):
            load_model(path)


def test_graphs_that_are_no_classifier(tmp_path):
    path = tmp_path / "m.onnx"
    for arguments, options, message in (
        (([node("Relu", "x", "y")], []), {}, r"output 'y' has shape \[1, 2, 6, 6\]"),
        (([node("Identity", "s", "y")], [constant("s", 3)]), {}, "does not depend on the images"),
        (([node("Pad", "x p", "y")], [integers("p", 0, 0, 1, 1, 0, 0, 1, 1)]), {}, "a padded value"),
        (([node("Relu", "x", "h"), *HEAD], head(72)), {"batch": 8}, r"shape \[8, 2, 6, 6\], expected a batch axis"),
        (([node("Relu", "x", "h"), *HEAD], head(72)), {"opset": 6}, "opset 6, expected 7 to"),
        (([node("Relu", "x", "h"), *HEAD], head(72)), {"opset": 99}, "opset 99, expected 7 to"),
        (([node("Relu", "x", "h"), *HEAD], head(72)), {"dtype": TensorProto.INT64}, "of type 7"),
        (([node("Relu", "x", "h"), node("Relu", "x", "h"), *HEAD], head(72)), {}, "value 'h' is defined twice"),
        (([node("Relu", "x", "x"), *HEAD], head(72)), {}, "value 'x' is defined twice"),
        (([node("Relu", "x", "h"), *HEAD], head(72, classes=1)), {}, r"expected \[1, classes\]"),
    ):
        written(path, *arguments, **options)
        with pytest.raises((CheckpointError, UnsupportedOperationError), match=message) as caught:
            load_model(path)
        assert str(path) in str(caught.value)


def spoiled(path, spoil):
    model = onnx.load(written(path, [node("Relu", "x", "h"), *HEAD], head(72)))
    spoil(model.graph)
    path.write_bytes(model.SerializeToString())
    return path


def test_tensors_are_checked_before_they_are_read(tmp_path):
    path = tmp_path / "m.onnx"

    def enlarge(graph):
        graph.initializer[0].dims[0] = 2**40

    def external(graph):
        graph.initializer[0].data_location = TensorProto.EXTERNAL
        entry = graph.initializer[0].external_data.add()
        entry.key, entry.value = "location", "/etc/passwd"

    def negative(graph):
        graph.initializer[0].dims[0] = -3

    def many(graph):
        graph.initializer[0].dims.extend([1] * 20)

    def nan(graph):
        graph.initializer[1].CopyFrom(numpy_helper.from_array(np.float32([np.nan, 0, 0]), "bias"))

    def kind(graph):
        graph.initializer[1].data_type = TensorProto.STRING

    def sparse(graph):
        graph.sparse_initializer.add()

    def second(graph):
        graph.input.add().name = "another"

    for spoil, message in (
        (enlarge, "holds 216 numbers, expected 79164837199872"),
        (external, "lies in another file"),
        (negative, "holds 216 numbers"),
        (many, "holds 216 numbers"),
        (nan, "'bias' holds NaN"),
        (kind, "is of type 8"),
        (sparse, "sparse or quantised"),
        (second, "2 inputs and 1 outputs"),
    ):
        with pytest.raises((CheckpointError, UnsupportedOperationError), match=message):
            load_model(spoiled(path, spoil))
    path.write_bytes(b"\x00\xff nothing of the kind")
    with pytest.raises(CheckpointError, match=r"m\.onnx"):
        load_model(path)


def test_wired_network_by_hand():
    steps = [Step("add", ("input", "c"), "a"), Step("halve", ("a",), "b"), Step("mul", ("b", "c"), "d")]
    network = WiredNetwork(steps, {"halve": nn.AvgPool1d(2)}, {"c": torch.tensor([1.0, 3.0])[:, None]})
    assert network(torch.ones(1, 2, 2)).tolist() == [[[2.0], [12.0]]]
    assert set(network.state_dict()) == {"constants.c"}
