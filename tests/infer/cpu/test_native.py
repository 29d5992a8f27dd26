"""The C++ kernels: weights expand to the same bits, rows do not depend on each other, and a whole
step equals the model's own."""

import ctypes
import itertools
import os
import platform
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.gguf.blocks import HALVES
from support.kernels.compiled import library_for
from support.kernels.packed_weights import BLOCKS, KINDS, weights_of
from support.small_engines import random_prompt
from support.tiny_models import MODELS, model_of, tiny_model
from torch import nn

from medusa_kit.base.model import wrap_model
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import native_decoder
from medusa_kit.infer.cpu.linear import install_native_linears
from medusa_kit.infer.cpu.packed.gguf_blocks import READERS, blocks_of, read_scales
from medusa_kit.infer.cpu.packed.packing import Blocks, pack
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.runners import backends as backends_module
from medusa_kit.infer.runners.backends import prepare_backends
from medusa_kit.infer.verifier import Verifier

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)
BRANCHING = (-1, 0, 0, 1, 2, 2, 4, 0)


def multiply(matrix, x, threads=2, library=None):
    out = torch.empty(len(x), matrix.struct.outputs)
    (library or kernels.load_library()).mk_linear(
        ctypes.byref(matrix.struct), x.data_ptr(), len(x), out.data_ptr(), threads
    )
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_kind(kind):
    weights = weights_of(kind)
    bias = torch.randn(37, generator=torch.Generator().manual_seed(3))
    matrix = pack(weights, bias, BLOCKS.get(kind))
    assert matrix.kind == kind.removesuffix(", wide")
    x = torch.randn(150, weights.shape[1], generator=torch.Generator().manual_seed(4))
    whole = multiply(matrix, x)
    expected = x.double() @ weights.double().T + bias.double()
    assert torch.allclose(whole.double(), expected, atol=2e-5 * float(expected.abs().max()))
    for rows, threads in itertools.product(range(1, 34), (1, 3)):
        few = multiply(matrix, x[:rows].contiguous(), threads)
        assert torch.equal(few, whole[:rows]), "a row's bits depend on its neighbours"


@pytest.mark.parametrize("kind", BLOCKS)
def test_one_row_of_ones_reads_the_very_weights(kind):
    """Each weight alone is returned with all its bits."""
    weights = weights_of(kind)
    matrix = pack(weights, None, BLOCKS[kind])
    unit = torch.eye(weights.shape[1])
    assert torch.equal(multiply(matrix, unit), weights.T)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("size", [1e-28, 1e-20, 1.0, 1e20, 1e27])
def test_what_is_rounded_away(kind, size):
    """No more than float32 rounds away, also with one number of a group far above the others."""
    weights = weights_of(kind).double()
    x = size * torch.randn(9, weights.shape[1], generator=torch.Generator().manual_seed(6))
    x[:, 5] *= 1000
    x[:, 20:] *= 0.001
    out = multiply(pack(weights.float(), None, BLOCKS[kind]), x).double()
    groups_NQS = x.double().unflatten(1, (-1, BLOCKS[kind].group))
    most_NQ = groups_NQS.abs().amax(-1)
    weight_OQ = weights.unflatten(1, (-1, BLOCKS[kind].group)).abs().sum(-1)
    rounded_NO = 2.0**-23 * (most_NQ @ weight_OQ.T)
    summed_NO = 2.0**-22 * (x.double().abs() @ weights.abs().T)
    error_NO = (out - x.double() @ weights.T).abs()
    assert (error_NO <= rounded_NO + summed_NO).all()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_does_not_become_one(kind, odd):
    x = torch.ones(2, 64)
    x[1, 40] = odd
    out = multiply(pack(weights_of(kind), None, BLOCKS[kind]), x)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("isa", ["avx2", "avx-vnni", "avx512-vnni"])
@pytest.mark.parametrize("kind", ["int4", "int8", "int8 by 16"])
def test_numbers_too_large_for_integers_are_none(isa, kind):
    """Instead of sums that wrap, of any size and sign."""
    x = torch.ones(4, 64)
    x[1, 40], x[2, 40], x[3, 40] = 3e38, -3e38, 1.0001 * 2.0**127
    out = multiply(pack(weights_of(kind), None, BLOCKS[kind]), x, library=library_for(isa))
    assert out[0].isfinite().all()
    assert not out[1:].isfinite().any()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are flags of x86 compilers")
@pytest.mark.parametrize("isa", ["plain", "avx2", "avx-vnni", "avx512"])
def test_other_instruction_sets(isa):
    """Each gives the same products, within rounding, and a row's own bits beside any others."""
    other = library_for(isa)
    assert other.mk_isa().decode() == isa
    assert kernels.has_integers(other) == (isa not in ("plain", "avx512"))
    for kind in KINDS:
        weights = weights_of(kind)
        matrix = pack(weights, None, BLOCKS.get(kind))
        x = torch.randn(17, weights.shape[1], generator=torch.Generator().manual_seed(5))
        x[0, 3] = 1000.0  # far above the others of its group
        out = multiply(matrix, x, library=other)
        assert torch.allclose(out, multiply(matrix, x), atol=1e-5 * float(out.abs().max()))
        for rows, threads in itertools.product(range(1, 18), (1, 3)):
            few = multiply(matrix, x[:rows].contiguous(), threads, other)
            assert torch.equal(few, out[:rows]), "a row's bits depend on its neighbours"


@pytest.mark.parametrize("isa", ["avx2", "avx-vnni", "avx512-vnni"])
@pytest.mark.parametrize("kind", ["int4", "int8", "int8 by 16"])
def test_no_sum_of_integers_overflows(isa, kind):
    """The largest codes and numbers, all of one sign, and numbers between two steps of a digit."""
    other, blocks = library_for(isa), BLOCKS[kind]
    ends = {"int4": (0, 15), "int8": (-128, 127), "int8 by 16": (-128, 127)}[kind]
    for end in ends:
        codes = torch.full_like(blocks.codes_OI, end)
        ones, none = torch.ones_like(blocks.scales_OQ), torch.zeros_like(blocks.scales_OQ)
        full = Blocks(codes, ones, None if blocks.offsets_OQ is None else none)
        matrix = pack(full.expand(), None, full)
        for number in (1.0, -1.0, 0.99999, 0.75, 2.0**-12, -(2.0**-12), 1 - 2.0**-13):
            x = torch.full((3, codes.shape[1]), number)
            x[1, ::2], x[2, 1] = 1.0, 1.0
            expected = x.double() @ full.expand().double().T
            out = multiply(matrix, x, library=other).double()
            assert torch.allclose(out, expected, rtol=1e-6, atol=1e-6 * abs(end)), (end, number)


@pytest.mark.parametrize("kind", READERS)
def test_gguf_kinds_expand_to_the_same_bits(kind):
    """Blocks of random bytes, whose scales are numbers, against the gguf package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    size, _ = READERS[kind]
    rng = np.random.default_rng(0)
    rows = 5
    raw = rng.integers(0, 256, (rows, 3, size), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.1, (rows, 3, 2)).astype(np.float16).view(np.uint8)
    places = HALVES[kind]
    for number, place in enumerate(places):
        raw[:, :, place : place + 2] = scales[:, :, 2 * number : 2 * number + 2]
    data = raw.reshape(rows, -1)
    weights = torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]).astype(np.float32))

    class Tensor:
        tensor_type = GGMLQuantizationType[kind]

    Tensor.data = data
    blocks = blocks_of(weights, *read_scales(Tensor, rows))
    assert torch.equal(blocks.expand(), weights)
    assert torch.equal(multiply(pack(weights, None, blocks), torch.eye(weights.shape[1])[:64]),
                       weights.T[:64])  # fmt: skip


def prefilled(base, prompts):
    """By torch."""
    verifier = Verifier(base)
    cache = verifier.new_cache(len(prompts), 64)
    verifier.read_prompts(cache, range(len(prompts)), prompts)
    return cache


def forward(verifier, prompts, parents, tokens, cache=None):
    cache = cache or prefilled(verifier.base, prompts)
    B, N = len(prompts), len(parents)
    nodes = Forest.of([tokens] * B, [parents] * B, torch.device("cpu"))
    scores = verifier.score(cache, nodes, range(B))
    ranked = scores.ranked_NR
    by_rows = SimpleNamespace(
        hidden_BND=scores.hidden_ND.view(B, N, -1), logits_BNV=scores.logits_NV.view(B, N, -1),
        ranked_BNR=None if ranked is None else ranked.view(B, N, -1),
        argmax_BN=scores.argmax().view(B, N),
    )  # fmt: skip
    return by_rows, cache


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_the_models_own(name, many_threads):
    base = wrap_model(model_of(name), None, name)
    native = NativeVerifier(base, native_decoder(base))
    prompts = [random_prompt(length, seed=length) for length in (4, 9, 17)]
    tokens = random_prompt(len(BRANCHING), seed=1)
    with torch.inference_mode():
        torchs, cache = forward(Verifier(base), prompts, BRANCHING, tokens)
        own, own_cache = forward(native, prompts, BRANCHING, tokens)
    for name in ("logits_BNV", "hidden_BND"):
        expected = getattr(torchs, name)
        atol = 2e-5 * float(expected.abs().max())
        assert torch.allclose(getattr(own, name), expected, atol=atol, rtol=0)
    assert torch.allclose(own_cache.block, cache.block, atol=1e-4)
    own_logits = own.logits_BNV
    assert torch.equal(own.argmax_BN, own_logits.argmax(-1))
    ranked = own_logits.sort(dim=-1, descending=True, stable=True).indices
    if not base.scale_logits.cap:  # under a cap different logits become equal
        assert torch.equal(own.ranked_BNR, ranked[..., :8])


@pytest.mark.parametrize("head_dim", [32, 48])
def test_heads_of_other_sizes(head_dim, many_threads):
    """Of whole groups of inputs, and larger than what threads share a matrix by."""
    base = wrap_model(tiny_model("llama", head_dim=head_dim), None, "llama")
    native = NativeVerifier(base, native_decoder(base))
    prompts = [random_prompt(length, seed=length) for length in (4, 40)]
    tokens = random_prompt(len(BRANCHING), seed=1)
    with torch.inference_mode():
        torchs, _ = forward(Verifier(base), prompts, BRANCHING, tokens)
        own, _ = forward(native, prompts, BRANCHING, tokens)
        alone, _ = forward(native, prompts[1:], BRANCHING[:3], tokens[:3])
    atol = 2e-5 * float(torchs.logits_BNV.abs().max())
    assert torch.allclose(own.logits_BNV, torchs.logits_BNV, atol=atol, rtol=0)
    assert torch.equal(own.logits_BNV[1:, :3], alone.logits_BNV)


def test_of_equal_logits_the_lower_column_ranks_first(many_threads):
    """Also where they are found by different threads, and where there is no number at all."""
    base = wrap_model(model_of("llama"), None, "llama")
    output = base.model.get_output_embeddings().weight
    with torch.no_grad():
        output.copy_(output[:5].repeat(-(-len(output) // 5), 1)[: len(output)])
    native = NativeVerifier(base, native_decoder(base))
    tokens = random_prompt(len(BRANCHING), seed=1)
    with torch.inference_mode():
        own, _ = forward(native, [random_prompt(4, seed=4)], BRANCHING, tokens)
        expected = own.logits_BNV.sort(dim=-1, descending=True, stable=True).indices
        assert torch.equal(own.ranked_BNR, expected[..., :8])
        native.native.packed.final_norm.fill_(torch.nan)
        own, _ = forward(native, [random_prompt(4, seed=4)], BRANCHING, tokens)
    assert own.logits_BNV.isnan().all()
    assert (own.ranked_BNR == torch.arange(8)).all()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_node_has_the_same_bits_in_any_tree_and_batch(name, many_threads):
    """A path alone, and the same path among siblings and rows: stronger than exactness needs."""
    base = wrap_model(model_of(name), None, name)
    native = NativeVerifier(base, native_decoder(base))
    prompts = [random_prompt(length, seed=length) for length in (4, 9, 17)]
    tokens = random_prompt(len(BRANCHING), seed=1)
    with torch.inference_mode():
        cache = prefilled(base, prompts)  # by torch, whose bits do depend on the batch
        singles = [prefilled(base, [prompt]) for prompt in prompts]
        for row, single in enumerate(singles):
            single.block.copy_(cache.block[:, :, row : row + 1])
        logits = forward(native, prompts, BRANCHING, tokens, cache)[0].logits_BNV
        for node, path in ((7, [0, 7]), (6, [0, 2, 4, 6]), (3, [0, 1, 3])):
            chain = tuple(range(-1, len(path) - 1))
            alone = [tokens[i] for i in path]
            for row, prompt in enumerate(prompts):
                scores, _ = forward(native, [prompt], chain, alone, singles[row])
                own = scores.logits_BNV
                assert torch.equal(own[0, -1], logits[row, node])


def test_expanded_rows_leave_what_lies_behind_them_alone():
    """Also where the inputs do not fill the eights in which weights lie."""
    weights, ids = weights_of("float32"), torch.tensor([36, 5])
    matrix, out = pack(weights), torch.full((3, weights.shape[1]), 7.0)
    done = kernels.load_library().mk_rows(
        ctypes.byref(matrix.struct), ids.data_ptr(), 2, 1.0, out.data_ptr()
    )
    assert done == 2
    assert torch.equal(out[:2], weights[ids])
    assert (out[2] == 7).all()


def test_a_step_that_the_self_check_refuses_is_not_used(monkeypatch, capsys):
    """For instance a multiplier that no module shows: then the model runs the steps."""
    base = wrap_model(model_of("llama"), None, "odd")

    def wrong(base):
        native = native_decoder(base)
        native._struct.scale *= 1.5
        return native

    monkeypatch.setattr(backends_module, "native_decoder", wrong)
    verifier = prepare_backends(base).verifier
    assert not isinstance(verifier, NativeVerifier)
    assert "the C++ ones were refused" in capsys.readouterr().err


def test_no_compiler_is_no_failure(monkeypatch, capsys, nothing_packaged):
    def broken(flags):
        raise RuntimeError("Ninja is required to load C++ extensions")

    monkeypatch.setattr(kernels, "build", broken)
    kernels.load_library.cache_clear()
    try:
        verifier = prepare_backends(wrap_model(model_of("llama"), None, "llama")).verifier
    finally:
        kernels.load_library.cache_clear()
    assert verifier.steps_run_by.startswith("torch, linear layers packed by MKL")
    assert "Ninja is required" in capsys.readouterr().err


def test_linear_layers_leave_gradients_and_long_inputs_to_torch():
    module = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 7)).requires_grad_(False)
    x = torch.randn(kernels.MAX_ROWS + 6, 20)
    expected = module(x)
    assert install_native_linears(module) == 2
    assert torch.equal(module(x), expected)
    assert torch.allclose(module(x[:5].view(5, 1, 20)).view(5, 7), expected[:5], atol=1e-5)
    x.requires_grad_()
    module(x[:3]).sum().backward()
    assert x.grad is not None


def test_the_self_check_itself_runs_the_kernels():
    base = wrap_model(model_of("gemma3"), None, "gemma3")
    backends = prepare_backends(base)
    verifier, check = backends.verifier, backends.check
    assert isinstance(verifier, NativeVerifier)
    assert verifier.steps_run_by.startswith("C++ (")
    assert check.relative_error < 1e-4
    for layer in verifier.native._struct.layers[: len(verifier.native.packed.layers)]:
        layer.out.data = layer.qkv.data  # another matrix's weights
    with pytest.raises(IncompatibleBaseError):
        backends_module.check_trees(verifier)


def test_steps_on_a_busy_machine_have_the_same_bits(many_threads):
    """One thread runs the rest where others wait long, which must not change the result."""
    base = wrap_model(model_of("llama"), None, "llama")
    native = NativeVerifier(base, native_decoder(base))
    prompts = [random_prompt(length, seed=length) for length in (4, 9, 17)]
    tokens = random_prompt(len(BRANCHING), seed=1)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        cache = prefilled(base, prompts)
        expected = forward(native, prompts, BRANCHING, tokens, cache)[0].logits_BNV
        try:
            torch.set_num_threads(4 * (os.cpu_count() or 1))  # far more than there are cores
            for _ in range(30):
                logits = forward(native, prompts, BRANCHING, tokens, cache)[0].logits_BNV
                assert torch.equal(logits, expected)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3"])
def test_prompts_in_pieces(name, monkeypatch, many_threads):
    """Prompts longer than a piece, rows of different lengths: the model's own numbers, and the bits
    that each row has alone."""
    base = wrap_model(model_of(name), None, name)
    native = NativeVerifier(base, native_decoder(base))
    prompts = [random_prompt(length, seed=length) for length in (3, 40, 25)]
    with torch.inference_mode():
        expected = Verifier(base).read_prompts(native.new_cache(3, 48), range(3), prompts)
        monkeypatch.setattr(kernels, "MAX_ROWS", 21)  # seven tokens of each at a time
        together = native.read_prompts(native.new_cache(3, 48), range(3), prompts)
        for ours, theirs in zip(together, expected, strict=True):
            assert torch.allclose(ours, theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)
        for row, prompt in enumerate(prompts):
            hidden, logits = native.read_prompts(native.new_cache(1, 48), [0], [prompt])
            assert torch.equal(hidden[0], together[0][row])
            assert torch.equal(logits[0], together[1][row])
