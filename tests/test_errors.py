"""Bad input: an error that names the argument, what it got and what it takes, before anything is launched or drawn."""

import math

import pytest
import torch

import xfused
from xfused.ops import bias_act_dropout as op

X = torch.ones(4, 6)
SEED = torch.tensor([1, 2])
BIG = 2**35 - 1, 2**32 - 1
quantised = (
    torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    if "fbgemm" in torch.backends.quantized.supported_engines
    else None
)

# arguments of bias_act_dropout, the error, what its message must say
OP = {
    "p below 0": ({"p": -0.1}, ValueError, ["p: got -0.1", "0 to 1"]),
    "p above 1": ({"p": 1.5}, ValueError, ["p: got 1.5", "0 to 1"]),
    "p NaN": ({"p": math.nan}, ValueError, ["p: got nan", "0 to 1"]),
    "p infinite": ({"p": math.inf}, ValueError, ["p: got inf", "0 to 1"]),
    "p a string": ({"p": "0.1"}, TypeError, ["p: got str", "0 to 1"]),
    "p a bool": ({"p": True}, TypeError, ["p: got bool", "0 to 1"]),
    "p a tensor": ({"p": torch.tensor(0.1)}, TypeError, ["p: got Tensor", "0 to 1"]),
    "p None": ({"p": None}, TypeError, ["p: got NoneType", "0 to 1"]),
    "bias too short": ({"bias": torch.ones(5)}, ValueError, ["bias: got shape (5,)", "(6,)"]),
    "bias of length 1": ({"bias": torch.ones(1)}, ValueError, ["bias: got shape (1,)", "(6,)"]),
    "bias with two dimensions": ({"bias": torch.ones(1, 6)}, ValueError, ["bias: got shape (1, 6)", "(6,)"]),
    "bias 0-dimensional": ({"bias": torch.tensor(1.0)}, ValueError, ["bias: got shape ()", "(6,)"]),
    "bias elsewhere": ({"bias": torch.ones(6, device="meta")}, ValueError, ["bias: got a tensor on meta", "cpu"]),
    "bias of integers": (
        {"bias": torch.ones(6, dtype=torch.int32)},
        TypeError,
        ["bias: got dtype torch.int32", "float32"],
    ),
    "bias a list": ({"bias": [1.0] * 6}, TypeError, ["bias: got list", "tensor"]),
    "x of integers": ({"x": torch.ones(4, 6, dtype=torch.int64)}, TypeError, ["x: got dtype torch.int64", "bfloat16"]),
    "x of bools": ({"x": torch.ones(4, 6, dtype=torch.bool)}, TypeError, ["x: got dtype torch.bool", "bfloat16"]),
    "x complex": ({"x": torch.ones(4, 6, dtype=torch.cfloat)}, TypeError, ["x: got dtype torch.complex64", "float64"]),
    "x of fp8": (
        {"x": torch.ones(4, 6).to(torch.float8_e4m3fn)},
        TypeError,
        ["x: got dtype torch.float8_e4m3fn", "float16"],
    ),
    "x sparse": ({"x": X.to_sparse()}, TypeError, ["x: got layout torch.sparse_coo", "strided"]),
    "x 0-dimensional": ({"x": torch.tensor(1.0)}, ValueError, ["x: got a 0-dimensional", "at least one"]),
    "x a number": ({"x": 1.0}, TypeError, ["x: got float", "tensor"]),
    "seed of three words": (
        {"seed": torch.tensor([1, 2, 3])},
        ValueError,
        ["seed: got a tensor of shape (3,)", "(2,)"],
    ),
    "seed 0-dimensional": ({"seed": torch.tensor(1)}, ValueError, ["seed: got a tensor of shape ()", "(2,)"]),
    "seed of int32": ({"seed": SEED.int()}, TypeError, ["seed: got a tensor of dtype torch.int32", "int64"]),
    "seed of floats": ({"seed": SEED.float()}, TypeError, ["seed: got a tensor of dtype torch.float32", "int64"]),
    "seed elsewhere": ({"seed": SEED.to("meta")}, ValueError, ["seed: got a tensor on meta", "cpu"]),
    "seed a float": ({"seed": 1.0}, TypeError, ["seed: got float", "int"]),
    "seed a bool": ({"seed": True}, TypeError, ["seed: got bool", "int"]),
    "seed a string": ({"seed": "1"}, TypeError, ["seed: got str", "int"]),
    "origin of bools": ({"origin": (False, False)}, TypeError, ["origin: got (False, False)", "two ints"]),
    "origin's row negative": ({"origin": (-1, 0)}, ValueError, ["origin: got (-1, 0)", "negative"]),
    "origin's column negative": ({"origin": (0, -2)}, ValueError, ["origin: got (0, -2)", "negative"]),
    "last row too far": ({"origin": (BIG[0] - 2, 0)}, ValueError, ["origin: got row", "2**35 - 1"]),
    "last column too far": ({"origin": (0, BIG[1] - 4)}, ValueError, ["origin: got column", "2**32 - 1"]),
    "origin of one number": ({"origin": (1,)}, TypeError, ["origin: got (1,)", "two ints"]),
    "origin a number": ({"origin": 3}, TypeError, ["origin: got 3", "two ints"]),
    "origin of floats": ({"origin": (0.0, 1)}, TypeError, ["origin: got (0.0, 1)", "two ints"]),
    "activation unknown": ({"activation": "geluu"}, ValueError, ["activation: got 'geluu'", *xfused.activations()]),
    "activation None": ({"activation": None}, TypeError, ["activation: got NoneType", "name"]),
    "activation a module of another kind": (
        {"activation": torch.nn.Linear(1, 1)},
        ValueError,
        ["activation: got", "gelu"],
    ),
    "activation another function": ({"activation": torch.sin}, ValueError, ["activation: got", "gelu"]),
}
if quantised is not None:
    OP["x quantised"] = ({"x": quantised}, TypeError, ["x: got dtype torch.qint8", "float32"])


@pytest.fixture
def nothing_changes(monkeypatch):
    """Fails if an operation is called, a kernel launched, or a random number drawn."""
    state = torch.get_rng_state()
    for name in ("launch_forward", "launch_backward", "_forward", "_backward"):
        monkeypatch.setattr(op, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
    yield
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("arguments, error, parts", OP.values(), ids=OP.keys())
def test_bad_arguments_of_the_op(nothing_changes, arguments, error, parts, grad):
    arguments = {
        "x": X.clone().requires_grad_(grad),
        "bias": torch.ones(6),
        "p": 0.5,
        "activation": "gelu",
        **arguments,
    }
    with pytest.raises(error) as raised:
        xfused.bias_act_dropout(arguments.pop("x"), arguments.pop("bias"), **arguments)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


@pytest.mark.parametrize("training, p", [(False, 0.5), (True, 0.0)])
@pytest.mark.parametrize(
    "case", ["p above 1", "seed of int32", "origin's row negative", "bias too short", "last row too far"]
)
def test_bad_arguments_are_errors_even_where_they_would_not_be_used(nothing_changes, case, training, p):
    arguments, error, _ = OP[case]
    with pytest.raises(error):
        xfused.bias_act_dropout(X, **{"p": p, "training": training, **arguments})


MASK = {
    name: ({key: value for key, value in arguments.items() if key != "x"}, error, parts)
    for name, (arguments, error, parts) in OP.items()
    if not arguments.keys() & {"x", "bias", "activation"} and name != "seed elsewhere"
}
MASK["shape ()"] = ({"shape": ()}, ValueError, ["shape: got ()", "at least one"])
MASK["shape negative"] = ({"shape": (3, -1)}, ValueError, ["shape: got (3, -1)", "negative"])
MASK["seed elsewhere"] = ({"seed": SEED.to("meta"), "device": "cpu"}, ValueError, ["seed: got a tensor on meta", "cpu"])


@pytest.mark.parametrize("arguments, error, parts", MASK.values(), ids=MASK.keys())
def test_bad_arguments_of_the_mask(nothing_changes, arguments, error, parts):
    arguments = {"shape": (4, 6), "p": 0.5, "seed": 1, **arguments}
    with pytest.raises(error) as raised:
        xfused.dropout_mask(**arguments)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


PARAMETERS = {
    "unknown": (("gelu", {"alpha": 1.0}), ValueError, ["alpha", "gelu", "none"]),
    "unknown beside a known": (("elu", {"beta": 1.0}), ValueError, ["beta", "elu", "alpha"]),
    "a string": (("elu", {"alpha": "1"}), TypeError, ["alpha: got str", "number"]),
    "a bool": (("elu", {"alpha": True}), TypeError, ["alpha: got bool", "number"]),
    "NaN": (("elu", {"alpha": math.nan}), ValueError, ["alpha: got nan", "finite"]),
    "infinite": (("hardtanh", {"max_val": math.inf}), ValueError, ["max_val: got inf", "finite"]),
    "celu's alpha 0": (("celu", {"alpha": 0}), ValueError, ["alpha: got 0", "0"]),
    "softplus's beta 0": (("softplus", {"beta": 0.0}), ValueError, ["beta: got 0", "0"]),
    "bounds crossed": (("hardtanh", {"min_val": 2.0}), ValueError, ["min_val: got 2.0", "max_val"]),
    "smelu's beta below 0": (("smelu", {"beta": -1.0}), ValueError, ["beta: got -1.0", "above 0"]),
}


@pytest.mark.parametrize("arguments, error, parts", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_bad_parameters_of_activations(arguments, error, parts):
    name, parameters = arguments
    with pytest.raises(error) as raised:
        xfused.activation(name, **parameters)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


@pytest.mark.parametrize(
    "make, part",
    [
        (lambda: xfused.BiasActDropout(4, p=1.5), "p: got 1.5"),
        (lambda: xfused.BiasActDropout(4, "nothing"), "activation: got 'nothing'"),
        (lambda: xfused.FusedMLP(4, dropout=-1.0), "dropout: got -1.0"),
        (lambda: xfused.FusedMLP(4, output_dropout=2), "output_dropout: got 2"),
        (lambda: xfused.FusedMLP(4, activation="nothing"), "activation: got 'nothing'"),
    ],
)
def test_bad_arguments_of_modules(make, part):
    with pytest.raises(ValueError, match=part):
        make()


def test_the_last_row_and_column_that_fit_are_no_error():
    assert xfused.dropout_mask((4, 6), 0.5, 1, origin=(BIG[0] - 3, BIG[1] - 5)).shape == (4, 6)
    assert xfused.bias_act_dropout(X, p=0.5, seed=1, origin=[BIG[0] - 3, BIG[1] - 5]).shape == (4, 6)
    assert xfused.bias_act_dropout(X[:0], p=0.5, seed=1, origin=(BIG[0] + 1, 0)).shape == (0, 6)


@pytest.mark.gpu
def test_tensors_on_different_devices():
    x = X.cuda()
    state = torch.cuda.get_rng_state()
    with pytest.raises(ValueError, match="bias: got a tensor on cpu, takes one on cuda:0"):
        xfused.bias_act_dropout(x, torch.ones(6), p=0.5)
    with pytest.raises(ValueError, match="seed: got a tensor on cuda:0, takes one on cpu"):
        xfused.bias_act_dropout(X, p=0.5, seed=SEED.cuda())
    assert torch.equal(torch.cuda.get_rng_state(), state)
