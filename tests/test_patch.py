"""patch on plain modules: what counts as a place, what a rewritten method keeps, wrappers, errors."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import xfused
from xfused import philox
from xfused.patch import source, table


@pytest.fixture
def numbered(monkeypatch):
    """The n-th dropout of a run, fused or not, drops by seed n."""
    calls = []

    def next_seed(*_):
        calls.append(len(calls))
        return torch.tensor((78, calls[-1]), dtype=torch.int64)

    def dropout(x, p=0.5, training=True, inplace=False):
        return x * xfused.dropout_mask(x.shape, p, next_seed()) / (1 - p) if training and p else x

    monkeypatch.setattr(philox, "draw_seed", next_seed)
    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(torch, "dropout", lambda x, p, train: dropout(x, p, train))
    return calls


class Base(nn.Module):
    """The parts that the layers below use."""

    def __init__(self, act=None, p=0.25, **linear):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10, **linear), nn.Linear(10, 6, **linear)
        self.act = nn.GELU() if act is None else act
        self.drop = nn.Dropout(p)
        self.norm = nn.LayerNorm(6)
        self.p = p


class Nested(Base):
    def forward(self, x):
        return self.fc2(self.drop(self.act(self.fc1(x))))


class Statements(Base):
    def forward(self, x):
        h = self.fc1(x)
        h = F.gelu(h, approximate="tanh")
        h: torch.Tensor = nn.functional.dropout(h, self.p, self.training)
        return self.fc2(h)


class Names(Base):
    def forward(self, x):
        a = self.fc1(x)
        b = self.act(a)
        c = torch.dropout(b, self.p, train=self.training)
        return self.fc2(c)


class Branches(Base):
    def forward(self, x):
        for _ in range(2):
            if self.p > 0:
                h = self.act(self.fc1(x))
                h = self.drop(h)
            else:
                h = self.fc1(x)
            x = x + self.fc2(h)
        return x


class Helper(Base):
    def forward(self, x):
        return x + self._mlp(x)

    def _mlp(self, x):
        x = self.drop(self.act(self.fc1(x)))
        return self.drop(self.fc2(x))


class Super(Nested):
    def forward(self, x, *, scale=2.0):
        h = self.drop(self.act(self.fc1(x)))
        return super().forward(x) * scale + self.fc2(h)


def decorated(function):
    import functools

    @functools.wraps(function)
    def twice(self, x):
        return 2 * function(self, x)

    return twice


class Decorated(Base):
    @decorated
    @torch.no_grad()
    def forward(self, x):
        return self.drop(self.act(self.fc1(x)))


FITS = [Nested, Statements, Names, Branches, Helper, Super, Decorated]


@pytest.mark.parametrize("cls", FITS)
def test_places_are_found_and_compute_the_same(cls, numbered, used):
    layer = cls().double()
    x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)

    def step():
        numbered.clear()
        layer.zero_grad()
        y = layer(x)
        if y.requires_grad:
            y.square().sum().backward()
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        gx, x.grad = x.grad, None
        return [y.detach(), *([] if gx is None else [gx]), *grads]

    expected = step()
    assert used == []
    report = xfused.patch(layer)
    assert any("dropout" in (entry.became or "") for entry in report), report
    torch.testing.assert_close(step(), expected)
    assert used
    xfused.unpatch(layer)
    assert type(layer) is cls and set(vars(layer)) == set(vars(cls()))
    used.clear()
    torch.testing.assert_close(step(), expected)
    assert used == []


class ValueUsedTwice(Base):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return self.fc2(self.drop(y)) + h.sum()


class ValueUsedLater(Base):
    def forward(self, x):
        h = self.fc1(x)
        y = self.drop(h)
        return self.fc2(y) + self.fc2(h)


class SomethingBetween(Base):
    def forward(self, x):
        h = self.fc1(x)
        x = x * 2
        h = self.drop(h)
        return self.fc2(h) + x


class Conditional(Base):
    def forward(self, x):
        h = self.fc1(x)
        return self.drop(h) if self.p > 0 else x


class OtherCallFirst(Base):
    def forward(self, x):
        h = self.fc1(x)
        h = torch.cat([self.norm(x), self.drop(h)], -1)
        return h


class LoopVariable(Base):
    def forward(self, x):
        for fc1 in (self.fc1, self.fc2):
            x = self.drop(fc1(x))
        return x


class Captured(Base):
    def forward(self, x):
        h = self.fc1(x)
        later = lambda: h  # noqa: E731
        h = self.fc1(x)
        h = self.drop(h)
        return later()


class Augmented(Base):
    def forward(self, x):
        h = self.fc1(x)
        h += self.drop(h)
        return x


@pytest.mark.parametrize(
    "cls",
    [ValueUsedTwice, ValueUsedLater, SomethingBetween, Conditional, OtherCallFirst, LoopVariable, Captured, Augmented],
)
def test_what_would_change_the_program_is_left(cls):
    layer = cls(p=0.0)
    x = torch.randn(2, 6)
    expected = layer(x)
    report = xfused.patch(layer)
    assert not any(entry.place.startswith("fc1 >") and entry.became for entry in report), report
    torch.testing.assert_close(layer(x), expected)


def reasons(module):
    return " ".join(entry.reason or "" for entry in xfused.patch(module))


def test_reasons():
    assert "no activation of xfused" in reasons(Nested(act=nn.Softmax(-1)))
    assert "no bias" in reasons(Helper(bias=False))
    assert xfused.patch(Nested(bias=False)).patched[0].became == "gelu + dropout"
    assert "in place" in reasons(Nested(act=nn.ReLU(inplace=True), bias=False))
    assert "already" in reasons(nn.Sequential(xfused.FusedMLP(4)))
    layer = Nested()
    layer.forward = layer.forward
    assert "replaced on the module" in reasons(layer) and type(layer) is Nested
    namespace = {"nn": nn, "Base": Base}
    exec("class Lost(Base):\n    def forward(self, x):\n        return self.drop(self.fc1(x))", namespace)
    assert "source" in reasons(namespace["Lost"]())

    class Wrapped(Nested):
        pass

    Wrapped.forward = decorated(Nested.forward)
    layer = Wrapped(p=0.0)
    x = torch.randn(2, 6)
    expected = layer(x)
    assert "wrapped after" in reasons(layer)
    assert torch.equal(layer(x), expected)


def test_a_method_replaced_between_two_patchings_is_read_again(used):
    class Changing(Base):
        def forward(self, x):
            return self.drop(self.act(self.fc1(x)))

    layer, x = Changing(p=0.0), torch.randn(2, 6)
    xfused.patch(layer)
    make, args, *_ = layer.__reduce_ex__(2)
    xfused.unpatch(layer)

    def forward(self, x):
        return 3 * self.drop(self.act(self.fc1(x)))

    Changing.forward = forward
    expected = layer(x)
    xfused.patch(layer)
    torch.testing.assert_close(layer(x), expected)
    assert len(used) == 1
    with pytest.raises(source.UnreadableError, match="another source"):
        make(*args)


def test_what_changes_after_patching_is_honoured(used, numbered):
    layer, x = Nested(act=nn.LeakyReLU(0.1)), torch.randn(4, 6)
    xfused.patch(layer)

    def check(calls):
        used.clear(), numbered.clear()
        y = layer(x)
        assert len(used) == calls
        numbered.clear()
        torch.testing.assert_close(y, layer.fc2(layer.drop(layer.act(layer.fc1(x)))))

    check(1)
    layer.drop.p = 0.5
    check(1)
    assert used[0]["p"] == 0.5
    layer.act.negative_slope = 0.3
    check(0)
    layer.act = nn.Softmax(-1)
    check(0)
    layer.act = nn.LeakyReLU(0.1)
    check(1)
    layer.fc1 = nn.Sequential(nn.Linear(6, 10))
    check(1)
    layer.drop = nn.Identity()
    check(0)
    layer.drop = nn.Dropout(0.2).eval()
    check(0)
    layer.eval()
    check(0)


@pytest.mark.parametrize("name", ["fc1", "act", "drop"])
def test_hooks_see_what_they_saw(name, used, numbered):
    layer, x, seen = Nested(), torch.randn(4, 6), []
    handle = getattr(layer, name).register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    layer(x)
    xfused.patch(layer)
    numbered.clear()
    layer(x)
    torch.testing.assert_close(seen[1], seen[0])
    assert len(used) == (name == "fc1")  # its bias is not left out, the rest is fused
    handle.remove()
    layer(x)
    assert len(used) == 1 + (name == "fc1") and len(seen) == 2


def test_functional_activations_keep_their_keywords(used):
    layer = Statements(p=0.0)
    x = torch.randn(4, 6)
    xfused.patch(layer)
    expected = layer.fc2(F.gelu(layer.fc1(x), approximate="tanh"))
    torch.testing.assert_close(layer(x), expected)
    assert used[0]["activation"].name == "gelu_tanh"
    layer.p = 0.5
    assert torch.equal(layer.eval()(x), expected)


class Doubled(nn.Linear):
    """Stands for a quantised or otherwise special layer."""

    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("when", ["before", "after"])
def test_other_linear_layers_are_called_as_they_are(when, numbered, used):
    layer, x = Nested(), torch.randn(4, 6)
    layer.fc1.__class__ = Doubled if when == "before" else nn.Linear
    report = xfused.patch(layer)
    assert report[0].became == ("gelu + dropout" if when == "before" else "bias + gelu + dropout")
    layer.fc1.__class__ = Doubled
    y = layer(x)
    numbered.clear()
    torch.testing.assert_close(y, layer.fc2(layer.drop(layer.act(layer.fc1(x)))))
    assert len(used) == 1


class Residual(Base):
    def forward(self, x):
        residual = x
        x = self.fc2(self.act(self.fc1(x)))
        x = F.dropout(x, p=self.p, training=self.training)
        x = residual + x
        return self.norm(x)


class ResidualInOne(Base):
    def forward(self, x):
        h = self.drop(self.fc2(self.act(self.fc1(x))))
        return self.norm(h + x)


@pytest.mark.parametrize("cls", [Residual, ResidualInOne])
def test_a_new_pattern_is_one_entry(cls, monkeypatch):
    calls = []

    def run_norm(owner, index, x, linear, norm, other, drop=None, p=None, training=None):
        calls.append((index, linear, norm))
        return norm(other + linear(x))

    new = table.Pattern(("linear", "dropout", "add", "norm"), run_norm)
    monkeypatch.setattr(source, "PATTERNS", (new, *table.PATTERNS))
    layer, x = cls(p=0.0), torch.randn(4, 6)
    expected = layer(x)
    assert "bias + dropout + add + norm" in [entry.became for entry in xfused.patch(layer)]
    torch.testing.assert_close(layer(x), expected)
    assert calls == [(0, layer.fc2, layer.norm)]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("make", [Nested, lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1))])
def test_copies(copied, make, used):
    layer = make()
    xfused.patch(layer)
    other = copied(layer)
    assert type(other) is type(layer) and isinstance(other, nn.Module)
    other(torch.randn(3, 6))
    assert len(used) == 1
    xfused.unpatch(other)
    layer(torch.randn(3, 6))
    assert len(used) == 2


def test_a_method_bound_before_unpatching_still_runs(used):
    layer, x = Nested(p=0.0), torch.randn(3, 6)
    expected = layer(x)
    xfused.patch(layer)
    forward = layer.forward
    xfused.unpatch(layer)
    assert torch.equal(forward(x), expected) and used == []


def test_names_and_types_stay():
    layer = Nested()
    xfused.patch(layer)
    assert type(layer).__name__ == "Nested" and type(layer).__qualname__ == Nested.__qualname__
    assert type(layer).__module__ == Nested.__module__ and isinstance(layer, Nested) and repr(layer) == repr(Nested())
    assert type(layer).forward.__code__.co_filename == Nested.forward.__code__.co_filename
    layer.fc1.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        layer(torch.randn(2, 6))
    lines = [entry.lineno for entry in error.traceback if str(entry.path) == __file__]
    assert Nested.forward.__code__.co_firstlineno in lines  # its one statement, at the place it has in this file


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models(when):
    torch._dynamo.reset()
    layer, x = nn.Sequential(Nested(p=0.5), Helper(p=0.5)), torch.randn(64, 6)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    if when == "after":
        compiled(x)
    assert len(xfused.patch(compiled).patched) == 3
    graphs = []

    def look(graph, _):
        graphs.append(str(graph.graph))
        return graph

    if when == "before":
        compiled = torch.compile(layer, backend=look, fullgraph=True)
        compiled(x)
        assert "xfused" in graphs[0].lower() or "autograd_function" in graphs[0].lower()
    y = compiled(x)
    assert not torch.equal(compiled(x), y)
    y.sum().backward()
    assert all(p.grad is not None for name, p in layer.named_parameters() if "norm" not in name)
    handle = layer[0].fc1.register_forward_hook(lambda m, a, out: out * 0)
    torch._dynamo.reset()
    assert torch.isfinite(compiled(x)).all()
    handle.remove()
    layer.eval()
    torch.testing.assert_close(compiled(x), layer(x))


def test_layers_compiled_one_by_one_share_their_code():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layers = nn.Sequential(*(Nested() for _ in range(12)))
    xfused.patch(layers)
    x = torch.randn(4, 6)
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
        x = layer(x)
    assert counter.frame_count <= 2


def test_wrapped_models():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    wrapped = Wrapper(Nested())
    assert [e.module for e in xfused.patch(wrapped)] == ["module"]
    xfused.unpatch(wrapped)
    assert type(wrapped.module) is Nested
    replica = Nested()
    xfused.patch(replica)
    assert type(replica._replicate_for_data_parallel()) is type(replica)


def test_a_class_changed_since_is_an_error():
    layer = Nested()
    xfused.patch(layer)
    patched = type(layer)
    layer.__class__ = type("Sharded", (patched,), {})
    model = nn.Sequential(layer, Nested())
    for function in (xfused.patch, xfused.unpatch):
        with pytest.raises(RuntimeError, match="0: its class became Sharded"):
            function(model)
    assert type(model[1]) is Nested
    layer.__class__ = patched
    xfused.unpatch(layer)


@pytest.mark.parametrize("function", [xfused.patch, xfused.unpatch])
@pytest.mark.parametrize("model", [None, Nested, lambda x: x])
def test_what_is_not_a_module_is_an_error(function, model):
    with pytest.raises(TypeError, match="model: got"):
        function(model)
