"""VariationalDropout and EmbeddingDropout as plain modules; tests/test_stream.py streams them."""

import copy

import pytest
import torch
from torch import nn

from revrnn import EmbeddingDropout, VariationalDropout
from revrnn.dropout import SequenceMasks


def test_one_mask_for_all_steps() -> None:
    torch.manual_seed(0)
    drop = VariationalDropout(0.5)
    output = drop(torch.ones(7, 4, 50))
    assert torch.equal(output, output[:1].expand_as(output))
    assert set(output.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(output[0, 0], output[0, 1])
    assert not torch.equal(drop(torch.ones(7, 4, 50)), output)
    x = torch.randn(3, 2, 5, requires_grad=True)
    (drop(x).sum()).backward()
    assert torch.equal(x.grad[0], x.grad[2])


def test_words_are_dropped_whole() -> None:
    torch.manual_seed(0)
    embedding = EmbeddingDropout(30, 4, p=0.5)
    tokens = torch.arange(30).repeat(3, 2)
    output = embedding(tokens)
    factor = (output / nn.functional.embedding(tokens, embedding.weight)).round()
    assert set(factor.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(factor, factor[:1, :30].repeat(3, 2, 1))
    assert torch.equal(factor[..., 0], factor[..., 3])


@pytest.mark.parametrize(
    "module",
    [VariationalDropout(0.5), EmbeddingDropout(5, 3, p=0.5)],
    ids=lambda m: type(m).__name__,
)
def test_off(module: nn.Module) -> None:
    embeds = isinstance(module, nn.Embedding)
    x = torch.randint(5, (4, 2)) if embeds else torch.randn(4, 2, 3)
    expected = nn.functional.embedding(x, module.weight) if embeds else x
    before = torch.get_rng_state()
    assert torch.equal(copy.deepcopy(module).eval()(x), expected)
    nothing = copy.deepcopy(module)
    nothing.p = 0.0
    assert torch.equal(nothing(x), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_dtypes_padding_and_repr() -> None:
    assert VariationalDropout(0.5)(torch.ones(2, 1, 3, dtype=torch.float64)).dtype == torch.float64
    embedding = EmbeddingDropout(5, 3, p=0.25, padding_idx=0, dtype=torch.bfloat16)
    assert not embedding.weight[0].any()
    assert embedding(torch.tensor([[1]])).dtype == torch.bfloat16
    assert repr(VariationalDropout(0.1)) == "VariationalDropout(p=0.1)"
    assert repr(embedding) == "EmbeddingDropout(5, 3, padding_idx=0, p=0.25)"
    plain = nn.Embedding(5, 3, padding_idx=0)
    EmbeddingDropout(5, 3).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_bad_probability(p: float) -> None:
    with pytest.raises(ValueError, match=r"p must be a number in \[0, 1\)"):
        VariationalDropout(p)
    with pytest.raises(ValueError, match=r"p must be a number in \[0, 1\)"):
        EmbeddingDropout(3, 2, p)


def test_masks_of_pieces() -> None:
    """The first piece draws, again too; the others use what it drew."""
    drop, ones = VariationalDropout(0.5), torch.ones(1, 1, 40)
    masks = SequenceMasks()
    torch.manual_seed(0)
    with masks.piece("stem", 0):
        a, b = drop(ones), drop(ones)
    after = torch.get_rng_state()
    with masks.piece("stem", 4):
        assert torch.equal(drop(ones), a)
        assert torch.equal(drop(ones), b)
        third = drop(ones)  # drawn here, for this piece and all that follow
    with masks.piece("head", 0):
        assert not torch.equal(drop(ones), a)
    with masks.piece("stem", 8):
        assert [torch.equal(drop(ones), mask) for mask in (a, b, third)] == [True] * 3
    torch.manual_seed(0)
    with masks.piece("stem", 0):
        assert torch.equal(drop(ones), a)
        assert torch.equal(drop(ones), b)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(drop(ones), a)


def test_a_module_made_for_one_call_is_not_taken_for_another() -> None:
    masks, ones = SequenceMasks(), torch.ones(1, 1, 40)
    found = []
    for piece in range(4):
        with masks.piece("head", piece):
            found.append(VariationalDropout(0.5)(ones))  # may be where the last one was
    assert len({tuple(mask.flatten().tolist()) for mask in found}) == 4


def test_mask_is_kept_when_the_block_is_left_by_an_error() -> None:
    masks = SequenceMasks()
    with pytest.raises(KeyError), masks.piece("stem", 0):
        raise KeyError
    drop, ones = VariationalDropout(0.5), torch.ones(1, 1, 40)
    assert not torch.equal(drop(ones), drop(ones))  # outside, every call draws
