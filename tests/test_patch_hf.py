"""patch on the real classes of transformers, and what a training loop does with them."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import xfused
from xfused import philox

transformers = pytest.importorskip("transformers")
from patch_models import MODELS, bart, gpt2, ids, t5  # noqa: E402


@pytest.fixture
def numbered(monkeypatch):
    """The n-th dropout of a run, fused or not, drops by seed n: two runs of one model then drop the same elements."""
    calls = []

    def next_seed(*_):
        calls.append(len(calls))
        return torch.tensor((77, calls[-1]), dtype=torch.int64)

    def dropout(x, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return x
        return x * xfused.dropout_mask(x.shape, p, next_seed()) / (1 - p)

    monkeypatch.setattr(philox, "draw_seed", next_seed)
    monkeypatch.setattr(F, "dropout", dropout)
    return calls


def run(model, batch, calls):
    """Output and gradients of one training step."""
    calls.clear()
    model.zero_grad()
    output = model(**batch)
    loss = output.loss if "loss" in output else output.logits.square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def double(batch):
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def fused_calls(monkeypatch):
    """Counts calls of the fused operation."""
    calls = []
    from xfused.patch import table

    real = table.bias_act_dropout_after
    monkeypatch.setattr(table, "bias_act_dropout_after", lambda *a, **k: calls.append(k) or real(*a, **k))
    return calls


FUSED = {"bart": 4, "whisper": 4, "wav2vec2": 5, "t5": 4, "gpt2": 6, "detr": 2, "bert": 3, "vit": 2}


@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_gradients_of_the_original_under_the_same_masks(name, numbered, monkeypatch):
    model, batch = MODELS[name]()
    model, batch = model.double().train(), double(batch)
    loss, grads = run(model, batch, numbered)
    drawn = len(numbered)
    used = fused_calls(monkeypatch)
    report = xfused.patch(model)
    assert len(report.patched) >= FUSED[name], str(report)
    patched_loss, patched_grads = run(model, batch, numbered)
    assert len(used) >= FUSED[name] and len(numbered) == drawn
    torch.testing.assert_close(patched_loss, loss, rtol=1e-11, atol=1e-12)
    assert patched_grads.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(
            patched_grads[key], grad, rtol=1e-9, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_eval_is_the_same_to_the_bit_and_unpatch_restores(name):
    model, batch = MODELS[name]()
    model.eval()
    expected = model(**batch).logits
    before = {path: (type(m), set(vars(m)), m) for path, m in model.named_modules()}
    tensors = [(key, id(t)) for key, t in model.named_parameters()]
    keys = list(model.state_dict())
    xfused.patch(model)
    assert torch.equal(model(**batch).logits, expected)
    assert [(key, id(t)) for key, t in model.named_parameters()] == tensors and list(model.state_dict()) == keys
    assert all(isinstance(m, before[path][0]) and m is before[path][2] for path, m in model.named_modules())
    assert any(type(m) is not before[path][0] for path, m in model.named_modules())
    xfused.unpatch(model)
    assert {path: (type(m), set(vars(m)), m) for path, m in model.named_modules()} == before
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_without_dropout_is_close_in_lower_precision(dtype):
    model, batch = bart(activation_dropout=0.0, dropout=0.0)
    model.to(dtype).train()
    loss = model(**batch).loss
    xfused.patch(model)
    torch.testing.assert_close(model(**batch).loss, loss, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


def places(report, fused=True):
    return {(e.class_name, e.place): e.became if fused else e.reason for e in report if (e.became is not None) == fused}


def test_reports_are_truthful():
    report = xfused.patch(bart()[0])
    fused, left = places(report), places(report, fused=False)
    assert fused == {
        (c, "fc1 > activation_fn > dropout"): "bias + gelu + dropout" for c in ("BartEncoderLayer", "BartDecoderLayer")
    }
    assert set(left) == {(c, "fc2 > dropout > + > final_layer_norm") for c in ("BartEncoderLayer", "BartDecoderLayer")}
    text = str(report)
    assert "2 x  model.encoder.layers.*" in text and "4 places fused, 4 left" in text
    report = xfused.patch(MODELS["bert"]()[0])
    assert ("BertIntermediate", "dense > intermediate_act_fn") in places(report)
    assert ("BertOutput", "dense > dropout > + > LayerNorm") in places(report, fused=False)
    report = xfused.patch(MODELS["vit"]()[0])
    assert places(report)["ViTMLP", "fc1 > activation_fn"] == "bias + gelu"
    report = xfused.patch(t5(feed_forward_proj="gated-gelu")[0])
    assert places(report) == {}
    assert "gated" in places(report, fused=False)["T5DenseGatedActDense", "wi_1 > * > dropout"]
    report = xfused.patch(gpt2(activation_function="xielu")[0]) if "xielu" in transformers.activations.ACT2FN else []
    assert not any(e.place.startswith("c_fc") and e.became for e in report)


def test_patching_twice_changes_nothing_and_brings_the_report_up_to_date():
    model, _ = gpt2()
    first = xfused.patch(model)
    types = [type(m) for m in model.modules()]
    assert xfused.patch(model) == first and [type(m) for m in model.modules()] == types
    model.transformer.h[0].mlp.act = nn.Softmax(-1)
    second = xfused.patch(model)
    assert [e.module for e in first if e.place == "c_fc > act"] == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    assert [e.module for e in second if e.place == "c_fc > act"] == ["transformer.h.1.mlp"]


@pytest.mark.parametrize("name", ["bart", "t5", "gpt2"])
def test_generate(name):
    model, batch = MODELS[name]()
    model.eval()
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(batch["input_ids"], **options)
    xfused.patch(model)
    assert torch.equal(model.generate(batch["input_ids"], **options), expected)


def test_save_pretrained_and_from_pretrained(tmp_path):
    model, batch = bart()
    xfused.patch(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert type(again) is transformers.BartForConditionalGeneration
    state = model.state_dict()
    assert all(torch.equal(t, state[key]) for key, t in again.state_dict().items()) and len(state) > 80
    torch.testing.assert_close(again(**batch).logits, model.eval()(**batch).logits)
    assert len(xfused.patch(again).patched) == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_copies_stay_patched_and_share_nothing(copied, name, monkeypatch):
    model, batch = MODELS[name]()
    xfused.patch(model)
    other = copied(model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    torch.manual_seed(1)
    loss = model.train()(**batch).loss
    used = fused_calls(monkeypatch)
    torch.manual_seed(1)
    assert torch.equal(other.train()(**batch).loss, loss) and len(used) >= 4
    xfused.unpatch(other)
    assert "_xfused_sites" in vars(model.model.encoder.layers[0] if name == "bart" else model.transformer.h[0].mlp)


def test_hooks_see_what_they_saw(monkeypatch):
    model, batch = bart(activation_dropout=0.0, dropout=0.0)
    layer = model.model.encoder.layers[0]
    seen = []
    handle = layer.fc1.register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
    layer.activation_fn.register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
    model.train()(**batch)
    xfused.patch(model)
    used = fused_calls(monkeypatch)
    model(**batch)
    assert len(seen) == 4 and torch.equal(seen[2], seen[0]) and torch.equal(seen[3], seen[1])
    assert len(used) == 3  # all layers but this one
    handle.remove()
    layer.activation_fn._forward_hooks.clear()
    model(**batch)
    assert len(used) == 7


def test_tied_weights_stay_tied():
    model, _ = bart()
    model.model.encoder.layers[1].fc1.weight = model.model.encoder.layers[0].fc1.weight
    xfused.patch(model)
    assert model.model.encoder.layers[1].fc1.weight is model.model.encoder.layers[0].fc1.weight
    assert model.lm_head.weight is model.model.shared.weight


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, monkeypatch):
    model, batch = bart()
    xfused.patch(model.double().train())
    grads = []
    used = fused_calls(monkeypatch)
    for checkpoint in (False, True):
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(5)
        model.zero_grad()
        model(**batch).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert len(used) == 4 + 8  # forward, and forward twice
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("first", ["patch", "peft"])
def test_lora_keeps_its_layer_and_the_rest_is_fused(first, numbered, monkeypatch):
    peft = pytest.importorskip("peft")
    model, batch = bart()
    model.double().train()
    config = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["fc1"], init_lora_weights=False)
    if first == "patch":
        xfused.patch(model)
    wrapped = peft.get_peft_model(model, config)
    xfused.unpatch(wrapped)
    expected = run(wrapped, batch, numbered)
    report = xfused.patch(wrapped)
    assert {e.place for e in report.patched} == {"fc1 > activation_fn > dropout"}
    used = fused_calls(monkeypatch)
    loss, grads = run(wrapped, batch, numbered)
    assert len(used) == 4
    torch.testing.assert_close(loss, expected[0])
    assert grads.keys() == expected[1].keys() and all("lora" in key for key in grads)
    for key in grads:
        torch.testing.assert_close(grads[key], expected[1][key])


def test_lora_put_in_after_patching_is_used(numbered):
    peft = pytest.importorskip("peft")
    model, batch = bart()
    xfused.patch(model.double().train())
    config = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["fc1"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    patched = run(wrapped, batch, numbered)
    xfused.unpatch(wrapped)
    plain = run(wrapped, batch, numbered)
    torch.testing.assert_close(patched[0], plain[0])
    for key in plain[1]:
        torch.testing.assert_close(patched[1][key], plain[1][key])


@pytest.mark.parametrize("compile_model", [False, pytest.param(True, id="torch_compile")])
def test_trainer(compile_model, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    model, _ = gpt2()
    xfused.patch(model)
    used = fused_calls(monkeypatch)
    data = [{"input_ids": row, "labels": row} for row in ids().repeat(2, 1)]
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, torch_compile=compile_model, torch_compile_backend="aot_eager" if compile_model else None,
    )  # fmt: skip
    result = transformers.Trainer(model, arguments, train_dataset=data).train()
    assert result.global_step == 2 and result.training_loss > 0
    assert used


@pytest.mark.parametrize("name", ["gpt2", "bart", "t5"])
def test_compile_makes_one_graph(name):
    model, batch = MODELS[name]()
    model.train()
    model.config.use_cache = False
    if name == "gpt2":
        del batch["labels"]  # its loss logs a warning, which is a graph break with or without us
    if name == "t5" and torch.__version__ < "2.13":
        try:
            torch.compile(model, backend="aot_eager", fullgraph=True)(**batch)
        except torch._dynamo.exc.Unsupported as error:
            pytest.skip(f"{name} itself, not patched, is not one graph: {str(error).splitlines()[0]}")
    torch._dynamo.reset()
    xfused.patch(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits = [compiled(**batch).logits for _ in range(2)]
    assert not torch.equal(*logits)  # another mask
    logits[0].square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_readmes_example():
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"```py\n(.*?)```", text, re.DOTALL) if "xfused.patch(" in block]
    exec(compile(example, "README.md", "exec"), {})
