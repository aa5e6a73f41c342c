import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, rnn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

import revrnn
from revrnn import RevGRU, RevLSTM, kernels

kinds = pytest.mark.parametrize("kind", [RevGRU, RevLSTM])
pairs = pytest.mark.parametrize(
    ("kind", "twin"), [(RevGRU, nn.GRU), (RevLSTM, nn.LSTM)], ids=["RevGRU", "RevLSTM"]
)

X, H, T, N = 5, 8, 7, 3  # input size, hidden size, steps, batch rows
LENGTHS = [4, 7, 2]


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def states(kind: type, *shape: int) -> Any:
    """An initial state in the form that the module takes."""
    h, c = 0.5 * data(*shape, seed=1), 0.5 * data(*shape, seed=2)
    return h if kind in (RevGRU, nn.GRU) else (h, c)


def each(state: Any) -> list[Tensor]:
    """h_n, or h_n and c_n."""
    return [state] if isinstance(state, Tensor) else list(state)


def build(kind: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(*(arguments or (X, H)), **settings)


def packed(x: Tensor, lengths: list[int] = LENGTHS, **settings: Any) -> PackedSequence:
    return rnn.pack_padded_sequence(
        x, torch.tensor(lengths), enforce_sorted=lengths == sorted(lengths)[::-1], **settings
    )


# -- shapes and orders ----------------------------------------------------------------------------


@pairs
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("form", ["batch", "row", "sorted", "unsorted"])
def test_shapes_are_those_of_torch(
    kind: type, twin: type, batch_first: bool, layers: int, bidirectional: bool, form: str
) -> None:
    settings = {
        "num_layers": layers,
        "bidirectional": bidirectional,
        "batch_first": batch_first,
    }
    ours, theirs = build(kind, **settings), build(twin, **settings)
    slots = layers * (1 + bidirectional)
    x: Any = data(T, X) if form == "row" else data(T, N, X)
    state = states(kind, slots, H) if form == "row" else states(kind, slots, N, H)
    if form == "sorted":
        x = packed(x, sorted(LENGTHS)[::-1])
    elif form == "unsorted":
        x = packed(x)
    elif form == "batch" and batch_first:
        x = x.transpose(0, 1)
    for hx in (None, state):
        (out, final), (expected, expected_final) = ours(x, hx), theirs(x, hx)
        if isinstance(expected, PackedSequence):
            assert isinstance(out, PackedSequence)
            for mine, its in zip(out[1:], expected[1:], strict=True):
                assert (mine is None and its is None) or torch.equal(mine, its)
            out, expected = out.data, expected.data
        assert out.shape == expected.shape
        assert [part.shape for part in each(final)] == [part.shape for part in each(expected_final)]


@kinds
@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_row_of_a_ragged_batch_is_its_own_sequence(kind: type, bidirectional: bool) -> None:
    """Lengths, permutations, initial and final states: each row as if it were alone, to the bit."""
    module = build(kind, num_layers=2, bidirectional=bidirectional)
    slots = 4 if bidirectional else 2
    x, state = data(T, N, X), states(kind, slots, N, H)
    out, final = module(packed(x), state)
    out, lengths = rnn.pad_packed_sequence(out)
    assert lengths.tolist() == LENGTHS
    for row, length in enumerate(LENGTHS):
        own = [part[:, row].contiguous() for part in each(state)]
        alone, alone_final = module(x[:length, row], own[0] if kind is RevGRU else tuple(own))
        assert torch.equal(out[:length, row], alone)
        assert not out[length:, row].any()
        for part, expected in zip(each(final), each(alone_final), strict=True):
            assert torch.equal(part[:, row], expected)


@kinds
def test_batch_first_only_turns_input_and_output(kind: type) -> None:
    module = build(kind)
    turned = build(kind, batch_first=True)
    x, state = data(T, N, X), states(kind, 1, N, H)
    out, final = module(x, state)
    other, other_final = turned(x.transpose(0, 1).contiguous(), state)
    assert torch.equal(other.transpose(0, 1), out)
    for part, expected in zip(each(other_final), each(final), strict=True):
        assert torch.equal(part, expected)


@kinds
def test_final_states_come_layer_by_layer_and_direction_by_direction(kind: type) -> None:
    module = build(kind, num_layers=2, bidirectional=True)
    out, final = module(data(T, N, X))
    h_n = each(final)[0]
    assert torch.equal(h_n[2], out[-1, :, :H])
    assert torch.equal(h_n[3], out[0, :, H:])

    below = build(kind, bidirectional=True)
    below.load_state_dict({k: v for k, v in module.state_dict().items() if "l0" in k})
    _, final_below = below(data(T, N, X))
    assert torch.equal(each(final_below)[0], h_n[:2])


@kinds
def test_a_state_carries_on(kind: type) -> None:
    """Two halves are the whole, up to the tape's lowest bits."""
    module = build(kind, num_layers=2)
    x = data(T, N, X)
    whole, _ = module(x)
    first, state = module(x[:3])
    second, _ = module(x[3:], state)
    assert torch.equal(first, whole[:3])
    torch.testing.assert_close(second, whole[3:], rtol=0, atol=1e-3)


@kinds
def test_a_state_may_be_changed_in_place(kind: type) -> None:
    """As training loops do that carry it on."""
    module = build(kind, num_layers=2)
    out, final = module(data(T, N, X))
    for part in each(final):
        part.detach_().zero_()
    out.sum().backward()


# -- parameters -----------------------------------------------------------------------------------


@kinds
def test_parameters_have_the_documented_names_and_shapes(kind: type) -> None:
    gates = 3 if kind is RevGRU else 5
    module = build(kind, num_layers=2, bidirectional=True)
    expected = {}
    for layer, width in ((0, X), (1, 2 * H)):
        for end in ("", "_reverse"):
            expected[f"weight_ih_l{layer}{end}"] = (gates * H, width)
            expected[f"weight_hh_l{layer}{end}"] = (gates * H, H // 2)
            expected[f"bias_l{layer}{end}"] = (gates * H,)
    assert {name: tuple(part.shape) for name, part in module.named_parameters()} == expected
    assert [len(slot) for slot in module.all_weights] == [3] * 4
    assert module.all_weights[3][1] is module.weight_hh_l1_reverse

    bare = build(kind, bias=False)
    assert sorted(bare.state_dict()) == ["weight_hh_l0", "weight_ih_l0"]
    bare(data(T, N, X))


@kinds
def test_reset_parameters_draws_as_torch_does(kind: type) -> None:
    module = kind(40, 100)
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(3)
    module.reset_parameters()
    for name, value in module.state_dict().items():
        assert not torch.equal(value, before[name])
        assert value.abs().max() <= 0.1
        assert value.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.1)
    again = copy.deepcopy(module)
    torch.manual_seed(3)
    again.reset_parameters()
    assert torch.equal(again.weight_hh_l0, module.weight_hh_l0)


@kinds
def test_copies_compute_the_same(kind: type) -> None:
    module = build(kind, num_layers=2, max_forget_bits=3, bidirectional=True)
    x = data(T, N, X)
    expected, _ = module(x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    fresh = kind(X, H, num_layers=2, max_forget_bits=3, bidirectional=True)
    fresh.load_state_dict(module.state_dict())
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
        fresh,
    ):
        assert repr(other) == repr(module)
        with pytest.raises(RuntimeError, match="there is no tape to report on"):
            other.tape_report()
        assert torch.equal(other(x)[0], expected)


@kinds
def test_state_dicts_survive_a_file_of_weights_only(kind: type) -> None:
    module = build(kind)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = kind(X, H)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.weight_ih_l0, module.weight_ih_l0)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        kind(X, H, bias=False).load_state_dict(module.state_dict())


@pairs
def test_repr_reads_as_in_torch(kind: type, twin: type) -> None:
    settings = {
        "num_layers": 2,
        "bias": False,
        "batch_first": True,
        "dropout": 0.5,
        "bidirectional": True,
    }
    for arguments in ({}, settings):
        assert repr(kind(X, H, **arguments)) == "Rev" + repr(twin(X, H, **arguments))
    special = kind(
        X, H, max_forget_bits=3, weight_dropout=0.1, reversible=False, tape="paper", chunk_size=9
    )
    assert repr(special) == (
        f"{kind.__name__}(5, 8, max_forget_bits=3, weight_dropout=0.1, reversible=False, "
        "tape='paper', chunk_size=9)"
    )


@kinds
def test_weights_may_come_from_parametrizations(kind: type) -> None:
    class Half(nn.Module):
        calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            Half.calls += 1
            return 0.5 * weight

    module, plain = build(kind), build(kind)
    with torch.no_grad():
        plain.weight_ih_l0.mul_(0.5)
    parametrize.register_parametrization(module, "weight_ih_l0", Half())
    Half.calls = 0
    out, _ = module(data(T, N, X))
    assert Half.calls == 1
    assert torch.equal(out, plain(data(T, N, X))[0])
    out.sum().backward()
    plain(data(T, N, X))[0].sum().backward()
    found = module.parametrizations.weight_ih_l0.original.grad
    assert torch.equal(found, 0.5 * plain.weight_ih_l0.grad)


@kinds
def test_norms_and_pruning_of_weights(kind: type) -> None:
    module = build(kind)
    weight_norm(module, "weight_hh_l0")
    prune.l1_unstructured(module, "weight_ih_l0", 0.25)
    module(data(T, N, X))[0].sum().backward()
    assert module.parametrizations.weight_hh_l0.original0.grad is not None
    pruned = module.weight_ih_l0_orig.grad[module.weight_ih_l0_mask == 0]
    assert len(pruned) == module.weight_ih_l0_mask.numel() // 4
    assert not pruned.any()


@kinds
def test_parameters_may_be_made_elsewhere(kind: type) -> None:
    with torch.device("meta"):
        module = kind(X, H)
    assert module.weight_ih_l0.is_meta
    module.to_empty(device="cpu")
    module.reset_parameters()
    module(data(T, N, X))
    x = data(T, N, X)
    values = {name: torch.zeros_like(part) for name, part in module.named_parameters()}
    out, _ = torch.func.functional_call(module, values, (x,))
    assert not out.any()
    torch.nn.utils.skip_init(kind, X, H)


# -- gradients ------------------------------------------------------------------------------------


@kinds
def test_only_what_asks_for_gradients_gets_them(kind: type) -> None:
    x = data(T, N, X).requires_grad_()
    module = build(kind, num_layers=2)
    module(x)[0].sum().backward()
    expected_x, expected = x.grad, module.weight_hh_l1.grad
    assert expected_x is not None

    module.zero_grad()
    module.requires_grad_(False)
    module.weight_hh_l1.requires_grad_(True)
    module(x.detach())[0].sum().backward()
    assert torch.equal(module.weight_hh_l1.grad, expected)
    assert module.weight_ih_l0.grad is None

    x.grad = None
    module.requires_grad_(False)
    module(x)[0].sum().backward()
    assert torch.equal(x.grad, expected_x)
    assert not module(x.detach())[0].requires_grad


@kinds
def test_without_gradients_there_is_no_tape(kind: type) -> None:
    module = build(kind)
    x = data(T, N, X)
    expected, _ = module(x)
    for context in (torch.no_grad(), torch.inference_mode()):
        quiet = copy.deepcopy(module)
        with context:
            out, final = quiet(x)
        assert torch.equal(out, expected)
        assert not out.requires_grad
        assert not each(final)[0].requires_grad
        with pytest.raises(RuntimeError, match="there is no tape to report on"):
            quiet.tape_report()


@kinds
def test_hooks_are_called(kind: type) -> None:
    module = build(kind)
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_full_backward_hook(lambda _, inputs, outputs: seen.append(inputs[0].shape))
    module.weight_hh_l0.register_hook(lambda grad: seen.append(grad.shape))
    module(data(T, N, X).requires_grad_())[0].sum().backward()
    assert seen == ["before", "after", module.weight_hh_l0.shape, (T, N, X)]


@kinds
def test_gradients_reach_the_initial_state(kind: type) -> None:
    module = build(kind, num_layers=2)
    state = states(kind, 2, N, H)
    for part in each(state):
        part.requires_grad_()
    out, final = module(packed(data(T, N, X)), state)
    (out.data.sum() + sum(part.sum() for part in each(final))).backward()
    for part in each(state):
        assert part.grad.shape == part.shape
        assert bool((part.grad != 0).any(2).all())


@kinds
def test_saved_tensors_may_leave_the_device_and_come_back(kind: type) -> None:
    module = build(kind, num_layers=2)
    x = data(T, N, X)
    expected = torch.autograd.grad(module(x)[0].sum(), module.weight_ih_l0)
    with torch.autograd.graph.save_on_cpu():
        out, _ = module(x)
    assert torch.equal(torch.autograd.grad(out.sum(), module.weight_ih_l0)[0], expected[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_layers": 2, "dropout": 0.4},
        {"hidden_dropout": 0.3},
        {"zoneout": 0.3},
        {"weight_dropout": 0.4},
        {"forget": "discrete", "max_forget_bits": 2},
    ],
    ids=str,
)
@kinds
def test_checkpointing_with_other_random_numbers(kind: type, settings: dict[str, Any]) -> None:
    """All that backward uses comes from the run that is made for it."""
    module = build(kind, reversible=False, **settings)
    weights, x = list(module.parameters()), data(T, N, X)

    def run(x: Tensor) -> Tensor:
        out: Tensor = module(x)[0]
        return out

    torch.manual_seed(1)
    first = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
    torch.manual_seed(2)
    found = torch.autograd.grad(first, weights, first.detach())
    torch.manual_seed(2)
    expected = torch.autograd.grad(run(x), weights, first.detach())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@kinds
def test_backward_twice_needs_the_graph_kept(kind: type) -> None:
    module = build(kind)
    out, _ = module(data(T, N, X))
    for _ in range(2):
        (grad,) = torch.autograd.grad(out.sum(), module.weight_ih_l0, retain_graph=True)
    assert torch.equal(grad, torch.autograd.grad(out.sum(), module.weight_ih_l0)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


@pytest.mark.parametrize("reversible", [True, False])
@kinds
def test_lengths_that_are_changed_afterwards_do_not_matter(kind: type, reversible: bool) -> None:
    module = build(kind, reversible=reversible)
    found = []
    for change in (False, True):
        sizes = torch.tensor([4, 3, 2])
        out, _ = module(PackedSequence(data(9, X), sizes))
        if change:
            sizes.copy_(torch.tensor([1, 1, 4001]))
        (gradient,) = torch.autograd.grad(out.data.sum(), module.weight_hh_l0)
        found.append(gradient)
    assert torch.equal(*found)


@kinds
def test_a_lazy_minus_is_carried_out(kind: type) -> None:
    """The imaginary part of a conjugate is a view of the same memory with a flag for its sign."""
    module = build(kind, 1, 8)
    x = torch.randn(1, 1, 1, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    minus = x.conj().imag
    assert minus.is_neg()
    assert minus.is_contiguous()
    assert torch.equal(module(minus)[0], module(-x.imag)[0])
    state = torch._neg_view(data(1, 1, 8, seed=1))
    starts = [s if kind is RevGRU else (s, s) for s in (state, state.resolve_neg())]
    assert torch.equal(*(module(minus, start)[0] for start in starts))
    found = []
    for gradient in (torch._neg_view(data(1, 1, 8)), -data(1, 1, 8)):
        found.append(torch.autograd.grad(module(minus)[0], module.bias_l0, gradient)[0])
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, about torch.jit
@kinds
def test_torch_transforms_say_no(kind: type) -> None:
    module = build(kind)
    with pytest.raises(RuntimeError, match=r"transforms of torch\.func cannot follow"):
        torch.vmap(lambda x: module(x)[0])(data(2, T, N, X))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward mode AD"),
    ):
        module(torch.autograd.forward_ad.make_dual(data(T, N, X), data(T, N, X)))
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(module, (data(T, N, X),))


@pytest.mark.slow  # it takes torch many seconds to load its compiler
@pytest.mark.filterwarnings("ignore")
@kinds
def test_models_may_be_compiled(kind: type) -> None:
    module = build(kind, num_layers=2)
    compiled = torch.compile(module, backend="eager")
    x = data(T, N, X)
    expected = torch.autograd.grad(module(x)[0].sum(), list(module.parameters()))
    found = torch.autograd.grad(compiled(x)[0].sum(), list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- keep -----------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("form", ["batch", "packed"])
def test_keep_gives_the_first_units_of_each_direction(
    kind: type, bidirectional: bool, form: str
) -> None:
    module = build(kind, num_layers=2, bidirectional=bidirectional)
    directions = 1 + bidirectional
    x: Any = data(T, N, X)
    if form == "packed":
        x = packed(x)
    out, final = module(x, keep=3)
    everything, _ = module(x)
    if form == "packed":
        out, everything = (rnn.pad_packed_sequence(part)[0] for part in (out, everything))
    assert out.shape == (T, N, 3 * directions)
    h_n = each(final)[0]
    ends = out[torch.tensor(LENGTHS) - 1, torch.arange(N)] if form == "packed" else out[-1]
    assert torch.equal(ends[:, :3], h_n[-directions, :, :3])
    if bidirectional:
        assert torch.equal(out[0, :, 3:], h_n[-1, :, :3])
    # The units kept draw no low bits from the tape: they are the same but for those.
    for direction in range(directions):
        part = everything[:, :, direction * H : direction * H + 3]
        torch.testing.assert_close(
            out[:, :, 3 * direction : 3 * direction + 3], part, rtol=0, atol=1e-3
        )


@kinds
def test_keep_nothing(kind: type) -> None:
    module = build(kind, num_layers=2)
    x = data(T, N, X)
    out, final = module(x, keep=0)
    assert out is None
    for part, expected in zip(each(final), each(module(x)[1]), strict=True):
        assert torch.equal(part, expected)
    each(final)[0].sum().backward()
    assert module.weight_ih_l0.grad.any()


@kinds
def test_what_is_kept_is_stored_and_nothing_else(kind: type) -> None:
    module = build(kind, num_layers=2)
    x = data(T, N, X)
    module(x)
    assert [layer.stored_bits for layer in module.tape_report().layers] == [0, 0]
    whole = module.tape_report()
    module(x, keep=2)
    report = module.tape_report()
    assert [layer.stored_bits for layer in report.layers] == [0, 32 * 2 * T * N]
    assert report.unit_steps == whole.unit_steps - 2 * T * N


# -- settings -------------------------------------------------------------------------------------


@kinds
def test_dropout_is_one_mask_a_sequence_and_off_in_eval(kind: type) -> None:
    module = build(kind, X, 64, num_layers=2, dropout=0.5)
    module(data(T, 1, X))[0].sum().backward()
    # A unit of the lower layer that is masked at every step gives its column no gradient.
    masked = (module.weight_ih_l1.grad == 0).all(0)
    assert 16 <= int(masked.sum()) <= 48
    first, second = module(data(T, N, X))[0], module(data(T, N, X))[0]
    assert not torch.equal(first, second)

    plain = build(kind, X, 64, num_layers=2)
    module.eval()
    assert torch.equal(module(data(T, N, X))[0], plain(data(T, N, X))[0])


@kinds
def test_dropout_between_bidirectional_layers(kind: type) -> None:
    module = build(kind, X, 32, num_layers=2, dropout=0.5, bidirectional=True)
    x = packed(data(T, N, X))
    out, _ = module(x)
    out.data.sum().backward()
    module.zero_grad()
    module(data(T, 1, X))[0].sum().backward()
    masked = (module.weight_ih_l1.grad == 0).all(0)
    assert 16 <= int(masked.sum()) <= 48
    assert torch.equal(masked, (module.weight_ih_l1_reverse.grad == 0).all(0))


@kinds
def test_a_dropout_without_effect_is_warned_of(kind: type) -> None:
    with pytest.warns(UserWarning, match="num_layers greater than 1") as caught:
        kind(X, H, dropout=0.5)
    assert caught[0].filename == __file__


@kinds
@pytest.mark.parametrize("reversible", [True, False])
def test_weight_dropout_is_drawn_once_a_call_and_off_in_eval(kind: type, reversible: bool) -> None:
    module = build(kind, X, 32, weight_dropout=0.5, reversible=reversible)
    module(data(T, N, X))[0].sum().backward()
    dropped = module.weight_hh_l0.grad == 0
    assert 0.4 < dropped.float().mean() < 0.6
    assert module.weight_ih_l0.grad.all()
    module.zero_grad()
    module(data(T, N, X))[0].sum().backward()
    assert not torch.equal(module.weight_hh_l0.grad == 0, dropped)

    module.eval()
    assert torch.equal(module(data(T, N, X))[0], build(kind, X, 32)(data(T, N, X))[0])


@kinds
@pytest.mark.parametrize("bits", [1, 2.5, 10])
def test_no_more_is_forgotten_than_allowed(kind: type, bits: float) -> None:
    module = build(kind, max_forget_bits=bits)
    with torch.no_grad():
        module.bias_l0.fill_(-50)  # forget everything
    module(data(T, N, X))
    report = module.tape_report()
    assert report.ideal_bits / report.unit_steps == pytest.approx(bits, rel=0.01)


@kinds
def test_the_chunk_size_changes_nothing(kind: type) -> None:
    x = packed(data(T, N, X))
    expected, _ = build(kind, num_layers=2)(x)
    for size in (1, 3, T, 100):
        module = build(kind, num_layers=2, chunk_size=size)
        out, _ = module(x)
        assert torch.equal(out.data, expected.data)
        out.data.sum().backward()


@kinds
def test_stored_states_give_the_same_bits(kind: type) -> None:
    settings = {"num_layers": 2, "bidirectional": True}
    x = packed(data(T, N, X))
    found = []
    for reversible in (True, False):
        module = build(kind, **settings, reversible=reversible)
        out, _ = module(x, keep=3)
        grads = torch.autograd.grad(out.data.square().sum(), list(module.parameters()))
        found.append([out.data, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@kinds
def test_the_papers_tape_runs_on_the_reference_kernels(kind: type) -> None:
    module = build(kind, tape="paper")
    module(data(T, N, X))[0].sum().backward()
    assert module.tape_report().held_bits % 64 == 0
    with kernels.use("reference"):
        module(data(T, N, X))
    if "cpu" in kernels.available():
        with kernels.use("cpu"), pytest.raises(ValueError, match="got 'cpu' forced by"):
            module(data(T, N, X))


# -- dtypes ---------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pairs
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_the_dtype_of_the_input_as_in_torch(
    kind: type, twin: type, dtype: torch.dtype
) -> None:
    ours, theirs = build(kind).to(dtype), build(twin).to(dtype)
    x, state = data(T, N, X).to(dtype), states(kind, 1, N, H)
    state = state.to(dtype) if kind is RevGRU else tuple(part.to(dtype) for part in state)
    for hx in (None, state):
        (out, final), (its, its_final) = ours(x, hx), theirs(x, hx)
        assert out.dtype == its.dtype
        assert [part.dtype for part in each(final)] == [part.dtype for part in each(its_final)]
    out.sum().backward()
    assert ours.weight_hh_l0.grad.dtype == dtype


@kinds
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_everything_is_computed_in_float32(kind: type, dtype: torch.dtype) -> None:
    module = build(kind, num_layers=2).to(dtype)
    single = build(kind, num_layers=2)
    single.load_state_dict({name: v.float() for name, v in module.state_dict().items()})
    x = data(T, N, X).to(dtype)
    (out, final), (expected, expected_final) = module(x), single(x.float())
    assert torch.equal(out, expected.to(dtype))
    for part, whole in zip(each(final), each(expected_final), strict=True):
        assert torch.equal(part, whole.to(dtype))
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(module.weight_ih_l0.grad, single.weight_ih_l0.grad.to(dtype))


@pairs
@pytest.mark.parametrize("given", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_under_autocast_results_have_the_dtype_that_torch_returns(
    kind: type,
    twin: type,
    given: torch.dtype | None,
    source: torch.dtype,
    weights: torch.dtype,
) -> None:
    ours, theirs = build(kind, num_layers=2).to(weights), build(twin, num_layers=2).to(weights)
    x, hx = data(T, N, X).to(source), None
    if given is not None:
        hx = states(kind, 2, N, H)
        hx = hx.to(given) if kind is RevGRU else tuple(part.to(given) for part in hx)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, final = ours(x, hx)
        its, its_final = theirs(x, hx)
    assert out.dtype == its.dtype
    assert [part.dtype for part in each(final)] == [part.dtype for part in each(its_final)]
    out.sum().backward()
    assert ours.weight_hh_l0.grad.dtype == weights
    # Autocast changes what is returned, not what is computed.
    assert torch.equal(out, ours.float()(x.float(), _floats(hx))[0].to(out.dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("reduced", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "twin"),
    [
        (RevGRU, nn.GRU),
        (RevLSTM, nn.LSTM),
        (revrnn.RevGRUCell, nn.GRUCell),
        (revrnn.RevLSTMCell, nn.LSTMCell),
    ],
)
def test_under_autocast_on_a_gpu_too(kind: type, twin: type, reduced: torch.dtype) -> None:
    x = data(N, X).cuda() if "Cell" in kind.__name__ else data(T, N, X).cuda()
    with torch.autocast("cuda", dtype=reduced):
        found, expected = build(kind).cuda()(x), build(twin).cuda()(x)
    assert [part.dtype for part in _flat(found)] == [part.dtype for part in _flat(expected)]


def _flat(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [part for result in results for part in _flat(result)]


def _floats(state: Any) -> Any:
    if state is None or isinstance(state, Tensor):
        return None if state is None else state.float()
    return tuple(part.float() for part in state)


@kinds
def test_autocast_leaves_float64_alone(kind: type) -> None:
    module = build(kind).double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = module(data(T, N, X).double())
    assert out.dtype == torch.float64
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match="input must have the dtype of the weights"),
    ):
        module(data(T, N, X))


# -- drop-in --------------------------------------------------------------------------------------


@pairs
def test_a_model_changes_in_one_line(kind: type, twin: type) -> None:
    """The same training loop for both, with the state carried on."""
    for each_kind in (twin, kind):
        torch.manual_seed(0)
        module = each_kind(X, H, 1, True, True)
        module.flatten_parameters()
        head = nn.Linear(H, 1)
        parameters = [*module.parameters(), *head.parameters()]
        state = None
        losses = []
        x = data(N, T, X)
        for _ in range(50):
            out, state = module(x, state)
            loss = (head(out).squeeze(2) - x[:, :, 0].sign()).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in parameters:
                    parameter.sub_(0.3 * parameter.grad)
                    parameter.grad = None
            state = _detached(state)
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]


def _detached(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach()
    return tuple(part.detach() for part in state)


def test_what_the_package_offers() -> None:
    for name in revrnn.__all__:
        assert hasattr(revrnn, name)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_torch_defaults_do_not_matter(bidirectional: bool) -> None:
    """The default dtype and device are for tensors that nobody said more about."""
    rnn = revrnn.RevLSTM(4, 8, 2, bidirectional=bidirectional, dropout=0.5, dtype=torch.float32)
    x = torch.randn(5, 2, 4)
    torch.manual_seed(3)
    expected, _ = rnn(x)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        with torch.device("meta"):
            output, _ = rnn(x)
        output.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(output, expected)
    assert all(parameter.grad is not None for parameter in rnn.parameters())
